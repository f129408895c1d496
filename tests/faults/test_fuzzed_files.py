"""Damaged files: what is read is as it was, or an error names the file; no code of theirs runs.

Each file that is read is changed at random, in a process of its own, which a crash of the
interpreter would end: bits flipped, cut, parts exchanged or zeroed, lengths enlarged, values of
another type, pickles that would run code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import traceback
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from dgl_mgpu.comm.serialization import NotPlainError, dumps, loads
from dgl_mgpu.comm.signing import SignedGroup
from dgl_mgpu.data import load, ogb, ogb_hetero
from dgl_mgpu.dgl.patches import ogb as ogb_load
from dgl_mgpu.errors import DGLMGPUError
from dgl_mgpu.machine import preset
from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement import Plan, TableSpec, solve
from dgl_mgpu.placement.hotness import load_accesses, save_accesses
from dgl_mgpu.report import MetricsLog, read_metrics
from dgl_mgpu.report.profile import StepProfile, read_profile
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose, hydra_arguments
from dgl_mgpu.train.minibatch.run import make_trainer
from dgl_mgpu.utils.checksums import with_sum
from dgl_mgpu.utils.tuning_cache import TuningCache
from tests.data import test_ogb, test_ogb_hetero
from tests.data.test_facebook import write_pages
from tests.data.test_planetoid import write_citeseer
from tests.data.test_reddit import write_reddit
from tests.faults.conftest import SEED
from tests.forkserver import forkserver
from tests.report.conftest import report_of_epoch
from tests.train.checkpoint.test_validation import (
    ODD,
    contents_of,
    places,
    refused_or_taken,
    with_other,
)
from tests.train.checkpoint.test_validation import run as run  # a fixture
from tests.train.jobs import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_BATCH = 25
# One mutant may take so long, and ask for so much memory beyond what its process has.
_SECONDS, _BYTES = 30, 4 << 30
_MARKER = "code-was-run"
_JSON_ODD = [each for each in ODD if not isinstance(each, torch.Tensor)]


# -- what is read ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Files, and what reads them.

    Attributes
    ----------
    make : callable
        Writes them into a folder.
    read : callable
        Reads them; what it returns is compared.
    pattern : str
        Which are changed.
    is_known : bool
        Whether the reader can know what was in them: else another result is none that it hides.
    may_be : callable
        Whether another result, which this is, is one that readers are told to expect.
    errors : tuple of type
        Beside the package's.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    pattern: str = "**/*"
    is_known: bool = True
    may_be: Callable[[Any, Any], bool] = lambda found, expected: False
    errors: tuple[type[Exception], ...] = field(default=())


def write_and_read(write: Callable[[Path], Any], read: Callable[[Path], Any]) -> Callable:
    """A maker of files that have been read once."""

    def make(folder: Path) -> None:
        write(folder)
        read(folder)

    return make


GENERATED = {"num_nodes": 120, "num_edges": 900}


def read_generated(folder: Path) -> Any:
    return load("generated", str(folder), **GENERATED)


EDGES = {"edge_feat": np.ones((test_ogb.NUM_EDGES, 1))}
CSV_META = test_ogb.META
BINARY_META = test_ogb.META | {"binary": "True"}


def write_ogb_cache(folder: Path) -> None:
    content = {
        "edge_index": np.arange(20).reshape(2, 10), "node_feat": np.ones((10, 3), np.float32),
        "num_nodes": 10, "tensor": torch.arange(5),
    }  # fmt: skip
    torch.save(content, folder / "data_processed", pickle_protocol=4)


RUN = [
    "data.options.num_nodes=120", "data.options.num_edges=600", "trainer.batch_size=32",
    "sampler.fanouts=[2,2]", "sampler.eval_fanouts=[2,2]", "model.hidden=4", "store.device=cpu",
]  # fmt: skip


def run_words() -> list[str]:
    return [*RUN, "trainer.epochs=2", f"data.root={os.environ['FUZZED_DATA']}"]


def write_run(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        train(folder, 1, *run_words(), "trainer.keep_checkpoints=2")
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("trainer:\n  epochs: 2\n")
    (folder / ".hydra" / "overrides.yaml").write_text("- trainer.epochs=2\n")


@functools.cache
def trainer():
    return make_trainer(compose(run_words()))


def read_run(folder: Path) -> Any:
    """What a run that goes on begins with, and what it knows of the run before."""
    path = folder / "checkpoints"
    words = [each for each in hydra_arguments([f"trainer.resume={path}"]) if str(path) not in each]
    checkpoint = Checkpoint.load(path)
    trainer().resume(checkpoint)
    state = trainer().checkpoint(checkpoint.config)
    return [words, state, read_metrics(folder / "metrics.jsonl")]


def is_of_before(found: Any, expected: Any) -> bool:
    """The checkpoint before is taken, which is told, or a last line is not whole."""
    state, (reports, summary) = found[1], found[2]
    _, (all_reports, full) = expected[1], expected[2]
    is_beginning = digest(reports) == digest(all_reports[: len(reports)])
    return state.epoch in (1, 2) and is_beginning and (summary is None or summary == full)


def write_metrics(folder: Path) -> None:
    with MetricsLog(folder) as log:
        for epoch in range(1, 5):
            log.append(report_of_epoch(epoch))
        log.summary({"best_epoch": 3, "test_accuracy": 0.5})


def is_beginning(found: Any, expected: Any) -> bool:
    """What a kill leaves: whole lines."""
    reports, summary = found
    return digest(reports) == digest(expected[0][: len(reports)]) and summary is None


def findings(folder: Path) -> TuningCache:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return TuningCache("found.json", 3, int)


def write_messages(folder: Path) -> None:
    path = folder / "message"
    report = {
        "text": "ä", "numbers": [1, 2.5, None, True], "tuple": (1, {2, 3}),
        "array": np.arange(6.0).reshape(2, 3), "tensor": torch.arange(4), "path": Path("/x"),
        "device": torch.device("cpu"), "dtype": torch.int8, "slice": slice(1, 2), "bytes": b"abc",
        "plan": machine(),
    }  # fmt: skip
    path.write_bytes(dumps(report))


def read_message(folder: Path) -> Any:
    """A value of plain data, whatever bytes make it; signatures say whose they are."""
    value = loads((folder / "message").read_bytes())
    with contextlib.suppress(NotPlainError):
        dumps(value)
    return value


def signed_group() -> Any:
    group = object.__new__(SignedGroup)
    group._rank, group._size, group._key, group._count = 1, 2, b"k" * 32, 7
    return group


def write_frame(folder: Path) -> None:
    frame = signed_group()._frame(dumps({"rows": [1, 2, 3]}))
    (folder / "frame").write_bytes(frame.numpy().tobytes())


def read_frame(folder: Path) -> Any:
    content = bytearray((folder / "frame").read_bytes()[:1024].ljust(1024, b"\0"))
    frame = torch.frombuffer(content, dtype=torch.uint8)
    group = signed_group()
    length = group._length(1, frame)
    return group._read(1, frame, frame[72 : 72 + length])


def machine() -> Topology:
    return preset("dgx1", 2)


PROFILE = StepProfile(3, 0.5, None, {"sample": 0.1}, {"": 0.2}, [("mm", 2.0, 0.1)])


def write_json(value: Any, folder: Path, name: str = "value.json") -> None:
    (folder / name).write_text(json.dumps(value, indent=1))


def read_json(read: Callable[[Any], Any], folder: Path) -> Any:
    """What a caller reads by json, whose errors are the caller's."""
    found = read(json.loads((folder / "value.json").read_text())).to_dict()
    assert read(found).to_dict() == found  # it is as good as any
    return found


def plan() -> Plan:
    table = TableSpec.features("feat", 100, 400, 1 / np.arange(1, 101), 100.0)
    return solve(machine(), [table], gpu_budget_bytes=6_000)


COUNTS = {"user": np.arange(40), "item": np.arange(7)}
NUM_NODES = {name: len(each) for name, each in COUNTS.items()}


def citeseer(folder: Path) -> Any:
    return load("citeseer", folder)


def facebook(folder: Path) -> Any:
    return load("facebook", folder, num_features=4)


def of_folder(module: Any, meta: dict[str, str]) -> Callable[[Path], Any]:
    return lambda folder: module.load_folder(folder, meta)


JSON_ERRORS = (ValueError, RecursionError)
SUBJECTS = {
    "Planetoid": Subject(write_and_read(write_citeseer, citeseer), citeseer),
    "Planetoid, first read": Subject(write_citeseer, citeseer, is_known=False),
    "Facebook": Subject(write_and_read(write_pages, facebook), facebook),
    "Facebook, first read": Subject(write_pages, facebook, is_known=False),
    "Reddit": Subject(write_reddit, lambda folder: load("reddit", folder)),
    "OGB, tables": Subject(
        write_and_read(test_ogb.write_csv_set, of_folder(ogb, CSV_META)), of_folder(ogb, CSV_META)
    ),
    "OGB, arrays": Subject(
        write_and_read(
            lambda folder: test_ogb.write_binary_set(folder, **EDGES), of_folder(ogb, BINARY_META)
        ),
        of_folder(ogb, BINARY_META),
    ),
    "OGB, several types": Subject(
        write_and_read(test_ogb_hetero.write_set, of_folder(ogb_hetero, test_ogb_hetero.META)),
        of_folder(ogb_hetero, test_ogb_hetero.META),
    ),
    "OGB, its own cache": Subject(
        write_ogb_cache, lambda folder: ogb_load.load(folder / "data_processed")
    ),
    "generated": Subject(write_and_read(lambda folder: None, read_generated), read_generated),
    "run": Subject(write_run, read_run, may_be=is_of_before),
    "metrics": Subject(
        write_metrics, lambda folder: read_metrics(folder / "metrics.jsonl"), may_be=is_beginning
    ),
    "profile": Subject(
        lambda folder: write_json(with_sum(asdict(PROFILE)), folder, "profile.json"), read_profile
    ),
    "counts of accesses": Subject(
        lambda folder: save_accesses(folder / "counts.npz", COUNTS),
        lambda folder: load_accesses(folder / "counts.npz", NUM_NODES),
    ),
    "findings": Subject(
        lambda folder: findings(folder).keep({"a": 7, "b": 9}),
        lambda folder: findings(folder).read(),
        may_be=lambda found, expected: found == {},  # it is measured again
    ),
    "plan": Subject(
        lambda folder: write_json(plan().to_dict(), folder),
        functools.partial(read_json, Plan.from_dict), is_known=False, errors=JSON_ERRORS,
    ),
    "topology": Subject(
        lambda folder: write_json(machine().to_dict(), folder),
        functools.partial(read_json, Topology.from_dict), is_known=False, errors=JSON_ERRORS,
    ),
    "messages of ranks": Subject(
        write_messages, read_message, is_known=False, errors=(NotPlainError,)
    ),
    "signed messages": Subject(write_frame, read_frame),
}  # fmt: skip


# -- how they are changed --------------------------------------------------------------------------


class Planted:
    """Runs code where its pickle is read by what calls whatever it names."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.marker),)


def flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def lengthen(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice([1, 7, 500])) + content[at:]


def exchange(content: bytes, rng: random.Random) -> bytes:
    one, two, three = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    return content[:one] + content[two:three] + content[one:two] + content[three:]


def zero(content: bytes, rng: random.Random) -> bytes:
    at, count = rng.randrange(len(content)), rng.choice([1, 4, 64, 4096])
    part = content[at : at + count]
    return content[:at] + bytes(len(part)) + content[at + len(part) :]


def enlarge(content: bytes, rng: random.Random) -> bytes:
    """What may be a length is one far too large."""
    at, count = rng.randrange(len(content)), rng.choice([2, 4, 8])
    large = rng.choice([b"\xff" * count, b"\x7f" + b"\xff" * (count - 1), b"\xff" * 3 + b"\x7f"])
    return content[:at] + large + content[at + len(large) :]


BYTES = (flip, flip, cut, lengthen, exchange, zero, enlarge)


def other_json(text: bytes, rng: random.Random) -> bytes:
    """A value of another type in a line of JSON, or in all of it."""
    lines = text.splitlines(keepends=True)
    try:
        number = rng.randrange(len(lines))
        value = json.loads(lines[number])
    except ValueError:
        lines, number = [text], 0
        value = json.loads(text)
    place = rng.choice(list(places(value)))
    odd = json.dumps(with_other(value, place, rng.choice(_JSON_ODD)))
    lines[number] = odd.encode() + b"\n"
    return b"".join(lines)


def other_pickle(marker: str, content: bytes, rng: random.Random) -> bytes:
    """Another object, or one that would run code, alone or among what was there."""
    planted = Planted(marker)
    with contextlib.suppress(Exception):
        whole = pickle.loads(content, encoding="latin1")
        if isinstance(whole, dict) and whole:
            whole[rng.choice(list(whole))] = planted if rng.random() < 0.5 else rng.choice(ODD)
            return pickle.dumps(whole, protocol=2)
    odd = [
        planted, [planted], {0: [planted]}, np.array([planted]), sparse.csr_matrix((3, 10**9)),
        sparse.csr_matrix(np.eye(3)), np.full((600, 12), np.nan), np.zeros((600, 12), "U3"),
        np.zeros((1, 600, 12)), {1: [2**80]}, {-1: [0]}, {0: "ab"}, *ODD,
    ]  # fmt: skip
    return pickle.dumps(rng.choice(odd), protocol=rng.choice([2, 4]))


def other_archive(marker: str, content: bytes, rng: random.Random) -> bytes:
    """An archive of arrays, one of which is another, perhaps of objects; its sums are right."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = rng.choice(list(arrays))
    odd = [
        np.array([Planted(marker)], object), np.array("x"), np.zeros(0), np.array([-1]),
        np.array([2**62]), np.zeros((2, 2, 2)), np.array([np.nan]), arrays[name][:1],
        np.arange(10.0), np.array([1 + 2j]),
    ]  # fmt: skip
    arrays[name] = rng.choice(odd)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def other_torch(marker: str, content: bytes, rng: random.Random) -> bytes:
    """A checkpoint whose sums are right, with code to run somewhere in it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            if name.endswith("/data.pkl"):
                member = pickle.dumps({"format": Planted(marker)}, protocol=2)
            archive.writestr(name, member)
    return out.getvalue()


def other_yaml(marker: str, content: bytes, rng: random.Random) -> bytes:
    odd = [
        f"!!python/object/apply:os.system ['touch {marker}']", "${oc.env:HOME}", "[1, 2", "~",
        "trainer:\n  epochs: !!python/name:os.system ''\n", "\0", "- " * 2000,
    ]  # fmt: skip
    return rng.choice(odd).encode()


def other_message(content: bytes, rng: random.Random) -> bytes:
    """The tree of a message is another; lengths are right."""
    size = int.from_bytes(content[:8], "big")
    head = json.loads(content[8 : 8 + size])
    names = [
        ["os", "system"], ["dgl_mgpu.cli", "main"], ["builtins", "eval"],
        ["dgl_mgpu.utils.tuning_cache", "TuningCache"],
        ["dgl_mgpu.train.checkpoint.checkpoint", "SpilledState"],
    ]  # fmt: skip
    odd = [{form: [rng.choice(names), "touch x"]} for form in ("object", "enum", "record")]
    odd += [{"tensor": [0, "torch.int64", [2**62, 4]]}, {"array": [0, "O", [1]]}, *_JSON_ODD]
    odd += [{"array": [0, "<f8", [-1]]}, {"tensor": [0, "torch.int8", [-1, -1]]}, {"size": [-5]}]
    odd += [{"scalar": [0, "<f8", []]}, {"slice": [1]}, {"complex": "x"}, {"device": "cuda:999"}]
    changed = json.dumps(with_other(head, rng.choice(list(places(head))), rng.choice(odd))).encode()
    return len(changed).to_bytes(8, "big") + changed + content[8 + size :]


def mutate(path: Path, marker: str, rng: random.Random) -> str:
    """Change a file; how, in a word."""
    content, before = path.read_bytes(), path.stat()
    how: list[Any] = [functools.partial(each) for each in BYTES] if content else [lengthen]
    name = path.name
    if content and name.endswith((".json", ".jsonl")):
        how += [other_json] * 4
    elif name.startswith("ind.") and not name.endswith("index"):
        how += [functools.partial(other_pickle, marker)] * 4
    elif name.endswith(".npz"):
        how += [functools.partial(other_archive, marker)] * 4
    elif name.endswith(".pt") or name == "data_processed":
        how += [functools.partial(other_torch, marker)] * 2
    elif name.endswith(".yaml"):
        how += [functools.partial(other_yaml, marker)] * 4
    elif name == "message":
        how += [other_message] * 6
    chosen = rng.choice(how)
    try:
        changed = chosen(content, rng)
    except (ValueError, IndexError, OverflowError):  # none of a kind that is changed so
        chosen, changed = flip, flip(content, rng)
    path.write_bytes(changed)
    if rng.random() < 0.5:  # a disk's damage leaves the times as they were
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return getattr(chosen, "func", chosen).__name__


# -- what comes of it ------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """The same for equal values, to the bit."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            each = each.numpy()
        if isinstance(each, np.ndarray):
            found.update(
                f"{each.dtype}{each.shape}".encode() + np.ascontiguousarray(each).tobytes()
            )
        elif isinstance(each, dict):
            for key, inner in each.items():
                found.update(repr(key).encode())
                add(inner)
        elif is_dataclass(each) and not isinstance(each, type):
            add({part.name: getattr(each, part.name) for part in fields(each)})
        elif isinstance(each, list | tuple):
            found.update(f"{type(each).__name__}{len(each)}".encode())
            for inner in each:
                add(inner)
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError(f"not read within {_SECONDS} s")


def try_batch(name: str, pristine: Path, work: Path, numbers: Iterable[int], results: Path) -> None:
    """Read mutants of these numbers; a line of what came of each."""
    subject = SUBJECTS[name]
    os.environ["FUZZED_DATA"] = str(pristine.parent / "data")
    marker = work.parent / f"{work.name}-{_MARKER}"
    signal.signal(signal.SIGALRM, _too_long)
    shutil.copytree(pristine, work)
    expected = subject.read(work)
    expected_digest = digest(expected)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, resource.RLIM_INFINITY))
    with results.open("a", buffering=1) as lines, open(os.devnull, "w") as nowhere:
        for number in numbers:
            rng = random.Random(f"{SEED} {name} {number}")
            shutil.rmtree(work)
            shutil.copytree(pristine, work)
            files = sorted(each for each in work.glob(subject.pattern) if each.is_file())
            path = rng.choice(files)
            lines.write(f'{{"number": {number}, "file": "{path.relative_to(work)}"')
            how = mutate(path, str(marker), rng)
            lines.write(f', "how": "{how}"')
            signal.alarm(_SECONDS)
            try:
                with contextlib.redirect_stderr(nowhere):
                    found = subject.read(work)
                if digest(found) == expected_digest:
                    came = "the same result"
                elif subject.may_be(found, expected):
                    came = "what is told to be left of it"
                elif not subject.is_known:
                    came = "another value, as said by the file"
                else:
                    came = f"WRONG: another result, {repr(found)[:300]}"
            except (DGLMGPUError, *subject.errors) as error:
                told = str(error)
                is_named = subject.errors or name == "signed messages"
                is_named = is_named or any(each.name in told for each in files)
                came = "a typed error" if is_named else f"WRONG: no file named, {told[:300]}"
            except BaseException:
                came = f"WRONG: {traceback.format_exc()[-1500:]}"
            signal.alarm(0)
            if marker.exists():
                came = "WRONG: code was run"
                marker.unlink()
            lines.write(f', "came": {json.dumps(came)}}}\n')


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file(name, tmp_path, outcomes, rounds):
    pristine, results = tmp_path / "pristine", tmp_path / "results"
    pristine.mkdir()
    os.environ["FUZZED_DATA"] = str(tmp_path / "data")
    SUBJECTS[name].make(pristine)
    wrong = []
    total = rounds(8, 80)
    for start in range(0, total, _BATCH):
        numbers = range(start, min(start + _BATCH, total))
        results.write_text("")
        batch = forkserver().Process(
            target=try_batch, args=(name, pristine, tmp_path / "work", numbers, results)
        )
        batch.start()
        batch.join(_SECONDS * (len(numbers) + 2))
        if batch.is_alive():
            batch.kill()
            batch.join()
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        for line in results.read_text().splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                break
            outcomes.add(found["came"].partition(":")[0])
            if found["came"].startswith("WRONG"):
                wrong.append(found)
        if batch.exitcode:
            outcomes.add("WRONG")
            wrong.append(f"the interpreter ended with {batch.exitcode}: {line}")
    if wrong:
        pytest.fail("\n".join(map(str, wrong)), pytrace=False)


def test_a_checkpoint_with_sound_sums(run, tmp_path, outcomes, rounds, rng):
    """Each field of it has another value at some place; sums are right."""
    trainer, path = run
    content = contents_of(path)
    for _ in range(rounds(30, 300)):
        name = rng.choice(list(content))
        place = rng.choice(list(places(content[name])))
        to, other = tmp_path / "other.pt", rng.choice(ODD)
        came = refused_or_taken(trainer, path, to, name, place, other)
        if came is not None:
            outcomes.add("taken as it is" if came else "a typed error")
    assert outcomes.counts["a typed error"] and outcomes.counts["taken as it is"]
