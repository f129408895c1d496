"""Claim: DGL's examples reach the same accuracy when their models run as CUDA graphs.

Each case is a script of DGL v2.1.0's ``examples``, or a notebook beside them, that calls a model
with the blocks of mini-batches. It is run, unmodified, by ``python -m dgl_mgpu --capture=off`` and
``--capture=on`` on one GPU, or as many as its arguments name, with several seeds. Its data are
generated, in the formats that it reads (:mod:`benchmarks.dgl_examples_data`), so that accuracies
tell that training works, and no more.
The mode ``everywhere`` is ``on`` with ``dgl_mgpu.capture_models()`` called when DGL is imported: it
captures models of scripts, too, that have no loader of DGL's on a GPU.

A ``sitecustomize`` in the folder of work, which all processes of a script import at their start,
seeds Python, NumPy, torch and DGL, counts replays of CUDA graphs, and gives ``torch.distributed`` a
free port in place of the one that the scripts name, so that several can run at a time. Beside it
stand in for torchtext and gensim, which have no release for today's torch and Python, the few
functions of theirs that the scripts use.

The result has of each run how it ended, its seconds, what the script printed last of its measure,
the reasons of capture warnings, and the number of replays. The modes of a case agree if their means
over the seeds are at most :data:`AGREEMENT` standard errors apart, each at least
:data:`RESOLUTION`. :data:`LEFT_OUT` names the scripts that are not run, and why.

    git clone --branch v2.1.0 https://github.com/dmlc/dgl
    python -m benchmarks.dgl_examples --dgl dgl --work outputs/dgl_examples --jobs 12 \\
        --out dgl_examples.json
    python -m benchmarks.dgl_examples --dgl dgl --only sage_puregpu rgat --seeds 5
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.datasets import NO_FILES
from benchmarks.dgl_examples_case import NUMBER, Case
from benchmarks.dgl_examples_graphbolt import GRAPHBOLT_CASES, GRAPHBOLT_LEFT_OUT, as_script
from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
OFF, ON, EVERYWHERE = "off", "on", "everywhere"
#: How a run ends, apart from exit statuses.
FINISHED, TOO_LONG = "finished", "at the limit"
#: Standard errors that the means of two modes may be apart.
AGREEMENT = 4.0
#: The least standard error of a difference: what a few hundred test nodes tell.
RESOLUTION = 2e-3

_SAGE = "pytorch/graphsage/node_classification.py"
_LINK = "pytorch/graphsage/link_pred.py"
_MULTI = "pytorch/multigpu/multi_gpu_"
_PRODUCTS = "pytorch/ogb/ogbn-products/"
_LABOR = "pytorch/labor/train_lightning.py"
_CPU = ("--mode", "cpu")
_MRR = rf"Test MRR {NUMBER}"
_MEAN = rf"Average test accuracy: {NUMBER}"


def _labor(name: str, *args: str) -> Case:
    shared = "--dataset", "ogbn-products", *args
    return Case(
        f"labor_{name}", _LABOR, (*shared, "--num-epochs", "8"), "ogbn-products",
        on_cpu=(*shared, "--num-epochs", "1"),
        requires=("torchmetrics", "pytorch-lightning"),
    )  # fmt: skip


CASES = (
    Case("sage_mixed", _SAGE, ("--mode", "mixed"), "ogbn-products", on_cpu=_CPU),
    Case("sage_puregpu", _SAGE, ("--mode", "puregpu"), "ogbn-products"),
    Case("sage_mixed_bfloat16", _SAGE, ("--mode", "mixed", "--dt", "bfloat16"), "ogbn-products"),
    Case(
        "sage_puregpu_bfloat16", _SAGE, ("--mode", "puregpu", "--dt", "bfloat16"), "ogbn-products"
    ),
    Case(
        "sampling_sage_mixed", "sampling/node_classification.py", ("--mode", "mixed"),
        "ogbn-products", on_cpu=_CPU,
    ),
    Case(
        "sampling_sage_gpu", "sampling/node_classification.py", ("--mode", "gpu"), "ogbn-products"
    ),
    *(
        Case(
            f"multigpu_sage_{mode}", "multigpu/node_classification_sage.py",
            ("--gpu", "0", "--mode", mode, "--num_epochs", "8"), "ogbn-products",
        )
        for mode in ("mixed", "puregpu", "benchmark")
    ),
    *(
        Case(
            f"multi_gpu_nodes_{mode}", f"{_MULTI}node_classification.py",
            ("--gpu", "0", "--mode", mode), "ogbn-products",
        )
        for mode in ("mixed", "puregpu")
    ),
    *(
        Case(
            f"multi_gpu_links_{mode}", f"{_MULTI}link_prediction.py",
            ("--gpu", "0", "--mode", mode), "ogbn-products",
            rf"Test F1-Score {NUMBER}", "test F1", requires=("scikit-learn<1.8",),
        )
        for mode in ("mixed", "puregpu")
    ),
    *(
        Case(
            f"link_{mode}", _LINK, ("--mode", mode), "ogbl-citation2", _MRR, "test MRR",
            _CPU if mode == "mixed" else None, (),
        )
        for mode in ("mixed", "puregpu")
    ),
    *(
        Case(
            f"sampling_link_{mode}", "sampling/link_prediction.py",
            ("--mode", mode), "ogbl-citation2", _MRR, "test MRR",
            (*_CPU, "--epochs", "2") if mode == "mixed" else None, (),
        )
        for mode in ("mixed", "puregpu")
    ),
    Case(
        "rgcn_sampled", "pytorch/rgcn/entity_sample.py", ("--dataset", "aifb"), "aifb",
        on_cpu=("--dataset", "aifb"), requires=("torchmetrics", "rdflib"),
    ),
    Case(
        "rgcn_multi_gpu", "pytorch/rgcn/entity_sample_multi_gpu.py",
        ("--dataset", "aifb", "--gpu", "0"), "aifb", requires=("torchmetrics", "rdflib"),
    ),
    Case(
        "rgcn_hetero", "pytorch/rgcn-hetero/entity_classify_mb.py",
        ("-d", "aifb", "--testing", "--gpu", "0", "-e", "6", "--num_workers", "1"), "aifb",
        on_cpu=("-d", "aifb", "--testing", "-e", "6", "--num_workers", "1"), requires=("rdflib",),
        loads_on_gpu=False,
    ),
    Case("rgat", "pytorch/rgat/train.py", (), "ogbn-mag", on_cpu=()),
    Case(
        "mag_rgcn", "pytorch/ogb/ogbn-mag/hetero_rgcn.py", ("--runs", "2"), "ogbn-mag",
        rf"Final Test: {NUMBER}", "test accuracy, %", ("--runs", "1"), ("psutil",),
    ),
    Case(
        "core_rgcn", "core/rgcn/hetero_rgcn.py", ("--num_gpus", "1"), "ogbn-mag",
        rf"Test accuracy {NUMBER}", "test accuracy, %", (), ("psutil",),
    ),
    Case(
        "products_sage", f"{_PRODUCTS}graphsage/main.py",
        ("--num-epochs", "3", "--num-workers", "0"), "ogbn-products", _MEAN,
        "mean test accuracy of 10 runs",
        ("--gpu", "-1", "--num-epochs", "2", "--num-workers", "0"), (), loads_on_gpu=False,
    ),
    Case(
        "products_gat", f"{_PRODUCTS}gat/main.py",
        ("--num-epochs", "3", "--num-workers", "0", "--num-hidden", "16"), "ogbn-products", _MEAN,
        "mean test accuracy of 10 runs",
        ("--gpu", "-1", "--num-epochs", "2", "--num-workers", "0", "--num-hidden", "4"), (),
        loads_on_gpu=False,
    ),
    _labor("labor", "--sampler", "labor"),
    _labor("importance", "--sampler", "labor", "--importance-sampling", "1"),
    _labor("neighbor", "--sampler", "neighbor"),
    _labor("uva", "--sampler", "labor", "--use-uva"),
    _labor("ladies", "--sampler", "ladies"),
    _labor("poisson", "--sampler", "poisson-ladies"),
    Case(
        "vrgcn", "pytorch/vrgcn/train_cv.py", ("--num-epochs", "11"), "reddit",
        rf"Eval Acc {NUMBER}", "validation accuracy", requires=(), loads_on_gpu=False,
    ),
    Case(
        "vrgcn_multi_gpu", "pytorch/vrgcn/train_cv_multi_gpu.py", ("--num-epochs", "11"), "reddit",
        rf"Eval Acc {NUMBER}", "validation accuracy", requires=(), loads_on_gpu=False,
    ),
    Case(
        "caregnn", "pytorch/caregnn/main_sampling.py",
        ("--gpu", "0", "--max_epoch", "6", "--batch_size", "64"), "amazon",
        rf"Test AUC: {NUMBER}", "test AUC",
        ("--max_epoch", "2", "--batch_size", "64", "--num_workers", "0"), ("scikit-learn",),
        is_seeded=True,
    ),
    Case(
        "gas", "pytorch/gas/main_sampling.py",
        ("--gpu", "0", "--max_epoch", "3", "--num_workers", "0"), "pol",
        rf"Test AUC: {NUMBER}", "test AUC", ("--max_epoch", "1", "--num_workers", "0"),
        ("scikit-learn",), loads_on_gpu=False,
    ),
    *(
        Case(
            name, f"pytorch/pinsage/{script}.py",
            ("dataset/movies", "--device", "cuda:0", "--num-epochs", "2",
             "--batches-per-epoch", "300", "--lr", "3e-3", "--hidden-dims", "32"), "movies",
            rf"^{NUMBER}$", "hits at 10",
            ("dataset/movies", "--batches-per-epoch", "50"), (), loads_on_gpu=False,
        )
        for name, script in (("pinsage", "model"), ("pinsage_sparse", "model_sparse"))
    ),
    *(
        Case(
            name, f"pytorch/GATNE-T/src/{script}.py",
            ("--input", "dataset/multiplex", "--epoch", "2", "--gpu", "0", "--num-walks", "5",
             "--workers", "2"), "multiplex",
            rf"Overall ROC-AUC: {NUMBER}", "test AUC",
            ("--input", "dataset/multiplex", "--epoch", "1", "--num-walks", "1", "--workers", "1"),
            ("scikit-learn", "networkx"), loads_on_gpu=False,
        )
        for name, script in (("gatne", "main"), ("gatne_sparse", "main_sparse"))
    ),
    *GRAPHBOLT_CASES,
)  # fmt: skip

#: Scripts that call a model with blocks, and why they are not run.
LEFT_OUT = MappingProxyType(
    {
        "pytorch/graphsage/lightning/node_classification.py": "needs four GPUs",
        "pytorch/graphsage/advanced/train_lightning_unsupervised.py": "needs pytorch-lightning 1",
        f"{_PRODUCTS}gat/gat.py": "needs ReduceLROnPlateau(verbose=…), which torch has no longer",
        "pytorch/ogb/ogbn-proteins/gat.py":
            "needs ReduceLROnPlateau(verbose=…), which torch has no longer",
        "pytorch/gcmc/train_sampling.py":
            "gives MultiLayerNeighborSampler return_eids, which DGL 2.1 refuses",
        "pytorch/han/train_sampling.py": "downloads its data in each run, whether there or not",
        "pytorch/ogb_lsc/MAG240M/train.py": "needs the 200 GB of MAG240M",
        "pytorch/ogb_lsc/MAG240M/train_multi_gpus.py": "needs the 200 GB of MAG240M",
        "pytorch/hilander/train_subg.py": "needs faiss, and data sets that are no longer there",
        "pytorch/GATNE-T/src/main_sparse_multi_gpus.py": "needs several GPUs",
        "pytorch/argo/main.py": "trains on the CPU",
        "pytorch/argo/ogb_example.py": "trains on the CPU",
        "pytorch/argo/ogb_example_ARGO.py": "trains on the CPU",
        "pytorch/graphsage/dist/train_dist.py": "is for several machines, with graphs on CPUs",
        "pytorch/rgcn/experimental/entity_classify_dist.py":
            "is for several machines, with graphs on CPUs",
        "distributed/graphsage/node_classification.py":
            "is for several machines, with graphs on CPUs",
        "advanced/cugraph/graphsage.py": "needs pylibcugraphops",
        "advanced/cugraph/rgcn.py": "needs pylibcugraphops",
        **GRAPHBOLT_LEFT_OUT,
    }
)  # fmt: skip

_WARNING = re.compile(r"\w+ runs kernel by kernel, not as a CUDA graph: .*")

_SITE = '''\
"""Seeds, a count of replays and a port for what runs with this folder in its PYTHONPATH."""

import importlib.util
import mmap
import os
import random
import sys

_SEED = int(os.environ["DGL_EXAMPLES_SEED"])
random.seed(_SEED)


def _after_torch(torch):
    torch.manual_seed(_SEED)
    replay, counter = torch.cuda.CUDAGraph.replay, []

    def counted(graph):
        if not counter:
            path = os.path.join(os.environ["DGL_EXAMPLES_COUNTS"], str(os.getpid()))
            with open(path, "w+b") as file:
                file.truncate(8)
                counter.append(mmap.mmap(file.fileno(), 8))
        count = int.from_bytes(counter[0][:8], "little") + 1
        counter[0][:8] = count.to_bytes(8, "little")
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted


def _after_distributed(distributed):
    init = distributed.init_process_group

    def with_port(*args, init_method=None, **kwargs):
        if init_method is not None:
            init_method = init_method.replace(":12345", ":" + os.environ["DGL_EXAMPLES_PORT"])
        return init(*args, init_method=init_method, **kwargs)

    distributed.init_process_group = with_port


def _after_numpy(numpy):
    numpy.random.seed(_SEED)


def _after_dgl(dgl):
    dgl.seed(_SEED)
    if "DGL_EXAMPLES_CAPTURE" in os.environ:
        import dgl_mgpu

        dgl_mgpu.capture_models()


class _AfterImport:
    """Calls a function when a module has been imported."""

    def __init__(self, name, call):
        self.name, self.call, self.is_busy = name, call, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.is_busy:
            return None
        self.is_busy = True
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.call(module)

            spec.loader.exec_module = exec_module
        return spec


for _name, _call in (
    ("numpy", _after_numpy),
    ("torch", _after_torch),
    ("torch.distributed", _after_distributed),
    ("dgl", _after_dgl),
):
    sys.meta_path.insert(0, _AfterImport(_name, _call))
'''

_TORCHTEXT_UTILS = """\
def get_tokenizer(tokenizer):
    return str.split
"""
_TORCHTEXT_FUNCTIONAL = """\
def numericalize_tokens_from_iterator(vocab, iterator):
    for tokens in iterator:
        yield iter(vocab[token] for token in tokens)
"""
_TORCHTEXT_VOCAB = """\
class Vocab(dict):
    def get_stoi(self):
        return self

    def get_itos(self):
        return list(self)


def build_vocab_from_iterator(iterator, specials=()):
    words = sorted({word for words in iterator for word in words})
    return Vocab((word, place) for place, word in enumerate([*specials, *words]))
"""
_GENSIM = """\
class Vocab:
    def __init__(self, count, index):
        self.count, self.index = count, index
"""
#: Files that scripts import, beside those of DGL.
SITE = MappingProxyType(
    {
        "sitecustomize.py": _SITE,
        "torchtext/__init__.py": "",
        "torchtext/data/__init__.py": "",
        "torchtext/data/utils.py": _TORCHTEXT_UTILS,
        "torchtext/data/functional.py": _TORCHTEXT_FUNCTIONAL,
        "torchtext/vocab.py": _TORCHTEXT_VOCAB,
        "gensim/__init__.py": "",
        "gensim/models/__init__.py": "",
        "gensim/models/keyedvectors.py": _GENSIM,
    }
)


@dataclass(frozen=True)
class Bench:
    """Where scripts, data and logs are, and for how many seconds one may run."""

    examples: Path
    work: Path
    limit: float
    has_gpu: bool

    def prepare(self, cases: Sequence[Case]) -> None:
        """Write what the scripts import and read."""
        from benchmarks.dgl_examples_data import write_all

        for name, text in SITE.items():
            path = self.work / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        write_all(sorted({case.data for case in cases if case.data}), self.work / "data")

    def run(self, case: Case, mode: str, seed: int) -> dict[str, Any]:
        """Run a script to its end or to the limit of time, and say what came of it."""
        folder = self.work / "runs" / f"{case.name}-{mode}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        counts = folder / "counts"
        counts.mkdir(parents=True)
        self._link_data(folder)
        script = self._script(case, folder)
        arguments = case.arguments(self.has_gpu)
        if arguments is None:
            raise ValueError(f"{case.name} needs a GPU")
        words = ["-m", "dgl_mgpu", f"--capture={OFF if mode == OFF else ON}", str(script)]
        start = time.perf_counter()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            job = subprocess.Popen(
                [sys.executable, *words, *arguments], cwd=folder, stdout=out, stderr=err,
                env=self._environment(folder, mode, seed), start_new_session=True,
            )  # fmt: skip
            try:
                status = job.wait(self.limit)
                ended = FINISHED if status == 0 else f"status {status}"
            except subprocess.TimeoutExpired:
                ended = TOO_LONG
            finally:
                _end(job)
        output = (folder / "stdout").read_text(errors="replace")
        errors = (folder / "stderr").read_text(errors="replace")
        result = {
            "seed": seed,
            "ended": ended,
            "seconds": round(time.perf_counter() - start, 1),
            "value": case.value(output),
            "warnings": warnings_in(errors),
            "replays": sum(int.from_bytes(it.read_bytes(), "little") for it in counts.iterdir()),
        }
        if ended != FINISHED:
            result["error"] = last_line(errors)
        return result

    def _script(self, case: Case, folder: Path) -> Path:
        path = self.examples / case.script
        if path.suffix != ".ipynb":
            return path
        script = folder / f"{path.stem}.py"
        script.write_text(as_script(path))
        return script

    def _link_data(self, folder: Path) -> None:
        """Let scripts add files of their own beside the data, which runs share."""
        for name in ("dataset", "datasets"):
            (folder / name).symlink_to(self.work / "data" / name)
        (folder / "dgl").mkdir()
        for path in (self.work / "data" / "dgl").iterdir():
            (folder / "dgl" / path.name).symlink_to(path)

    def _environment(self, folder: Path, mode: str, seed: int) -> dict[str, str]:
        paths = [str(self.work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONHASHSEED": str(seed),
            "PYTHONUNBUFFERED": "1",
            "DGLBACKEND": "pytorch",
            "DGL_DOWNLOAD_DIR": str(folder / "dgl"),
            # Checkpoints of these scripts hold more than tensors, as torch loaded all by then.
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
            "DGL_EXAMPLES_SEED": str(seed),
            "DGL_EXAMPLES_COUNTS": str(folder / "counts"),
            "DGL_EXAMPLES_PORT": str(_free_port()),
        }
        if mode == EVERYWHERE:
            environment["DGL_EXAMPLES_CAPTURE"] = "1"
        return environment


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a script with all that it has started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def warnings_in(errors: str) -> list[str]:
    """Warnings of models that are not captured, each once."""
    return list(dict.fromkeys(it.strip() for it in _WARNING.findall(errors)))


def last_line(errors: str) -> str:
    """The last line of a script's errors: what it raised, mostly."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means and standard deviations by mode, and whether each mode agrees with ``off``."""
    result: dict[str, Any] = {}
    values = {}
    for mode, each in runs.items():
        values[mode] = [run["value"] for run in each if run["value"] is not None]
        result[mode] = {
            "finished": sum(run["ended"] == FINISHED for run in each),
            "runs": len(each),
            "mean": statistics.mean(values[mode]) if values[mode] else None,
            "deviation": statistics.stdev(values[mode]) if len(values[mode]) > 1 else None,
            "captured": sum(run["replays"] > 0 for run in each),
        }
    for mode in runs:
        if mode != OFF and OFF in runs and values[mode] and values[OFF]:
            errors = standard_errors(values[OFF], values[mode])
            result[mode]["standard_errors_from_off"] = errors
            result[mode]["agrees"] = errors <= AGREEMENT
    return result


def standard_errors(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two means are apart, in standard errors of their difference."""
    means = statistics.mean(one), statistics.mean(other)
    # Shares of percent are measured in percent.
    least = RESOLUTION * (100 if max(map(abs, means)) > 1 else 1)
    variance = sum(statistics.variance(it) / len(it) for it in (one, other) if len(it) > 1)
    return abs(means[0] - means[1]) / max(math.sqrt(variance), least)


def _row(name: str, summary: Mapping[str, Any]) -> str:
    text = f"{name:24}"
    for mode in (OFF, ON, EVERYWHERE):
        found = summary.get(mode)
        if found is None:
            continue
        mean = "none" if found["mean"] is None else f"{found['mean']:.4f}"
        spread = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
        text += f" {mode} {mean}{spread} ({found['finished']} of {found['runs']} finished"
        text += f", {found['captured']} captured)" if mode != OFF else ")"
        if found.get("agrees") is False:
            text += " DIFFERS"
    return text


def main() -> None:
    """Print a row for each case, and keep all runs in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dgl", type=Path, default=Path("dgl"), help="a checkout of DGL v2.1.0")
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/dgl_examples"), help="for data and logs"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--modes", nargs="+", default=[OFF, ON], choices=(OFF, ON, EVERYWHERE))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="write the runs here, as JSON")
    options = parser.parse_args()
    # Not before: its import of torch takes seconds, and --help needs none of it.
    import torch

    bench = Bench(
        (options.dgl / "examples").resolve(), options.work.resolve(), options.limit,
        torch.cuda.is_available(),
    )  # fmt: skip
    asked = [case for case in CASES if not options.only or case.name in options.only]
    if absent := [case.script for case in asked if not (bench.examples / case.script).is_file()]:
        print(f"needs the files of DGL's examples: no {', '.join(dict.fromkeys(absent))}")
        sys.exit(NO_FILES)
    left_out = dict(LEFT_OUT)
    cases = []
    for case in asked:
        if case.arguments(bench.has_gpu) is None:
            left_out[case.name] = "needs a GPU"
        elif bench.has_gpu and case.num_gpus > torch.cuda.device_count():
            left_out[case.name] = f"needs {case.num_gpus} GPUs"
        elif missing := case.absent():
            left_out[case.name] = f"needs {', '.join(missing)}"
        else:
            cases.append(case)
    bench.prepare(cases)
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        if options.out:
            content = {
                "machine": describe_machine(),
                "options": {name: str(value) for name, value in vars(options).items()},
                "figures": rows,
                "left_out": left_out,
            }
            options.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    with ThreadPoolExecutor(options.jobs) as threads:
        waiting: list[tuple[Case, dict[str, list[Future[dict[str, Any]]]]]] = []
        for case in cases:
            runs: dict[str, list[Future[dict[str, Any]]]] = {mode: [] for mode in options.modes}
            for seed, mode in itertools.product(range(options.seeds), options.modes):
                runs[mode].append(threads.submit(bench.run, case, mode, seed))
            waiting.append((case, runs))
        for case, submitted in waiting:
            found = {mode: [it.result() for it in each] for mode, each in submitted.items()}
            summary = compared(found)
            row = {
                "case": case.name,
                "script": case.script,
                "arguments": " ".join(case.arguments(bench.has_gpu) or ()),
                "data": case.data,
                "measure": case.measure,
                "is_seeded": case.is_seeded,
                "loads_on_gpu": case.loads_on_gpu,
                "modes": summary,
                "warnings": sorted({it for each in found.values() for run in each
                                    for it in run["warnings"]}),
                "runs": found,
            }  # fmt: skip
            rows.append(row)
            print(_row(case.name, summary), flush=True)
            for text in row["warnings"]:
                print(f"    {text}", flush=True)
            for text in sorted({run.get("error", "") for each in found.values() for run in each}):
                if text:
                    print(f"    ended early: {text}", flush=True)
            keep()
    keep()
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")


if __name__ == "__main__":
    main()
