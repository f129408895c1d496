"""Packages that are loaded at their first use: what sees them, and what does not."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path

import pytest

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.utils.late_imports import late_imports

FILES = {
    "heavy/__init__.py": "from heavy import below\nNUMBER = 7\n__version__ = '1.2'\n",
    "heavy/below/__init__.py": "",
    "heavy/below/deep.py": "class Thing:\n    limit = 3\ndef double(x): return 2 * x\n",
    "user_of_heavy.py": (
        "import heavy as h\nimport heavy.below.deep as deep\n"
        "from heavy.below.deep import Thing, double\n"
    ),
    "early_user.py": "import heavy\nnumber = heavy.NUMBER\n",
    "early_reader.py": "import heavy\nversion = heavy.__version__\n",
}
NAMES = ("heavy.below.deep:Thing", "heavy.below.deep:double")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported(name: str = "user_of_heavy", packages: tuple[str, ...] = NAMES):
    finders = list(sys.meta_path)
    with late_imports({"heavy": packages}):
        module = importlib.import_module(name)
    assert sys.meta_path == finders
    return module


def loaded() -> bool:
    return any(name.partition(".")[0] == "heavy" for name in sys.modules)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda user: user.h.NUMBER, 7),
        (lambda user: user.h.__version__, "1.2"),
        (lambda user: user.h.__doc__, None),
        (lambda user: user.deep.double(3), 6),
        (lambda user: user.h.below.deep.double(3), 6),
        (lambda user: user.double(3), 6),
        (lambda user: user.Thing.limit, 3),
        (lambda user: isinstance(user.Thing(), user.Thing), True),
        (lambda user: pickle.loads(pickle.dumps(user.double))(4), 8),
    ],
)
def test_what_was_imported_late_is_as_ever_when_it_is_used(packages, use, expected):
    user = imported()
    assert not loaded()
    assert use(user) == expected


def test_asking_for_the_type_of_something_loads_nothing(packages):
    user = imported()
    assert not isinstance(5, user.Thing)
    assert not loaded()


def test_an_instance_that_others_made_is_one(packages):
    user = imported()
    deep = importlib.import_module("heavy.below.deep")
    assert isinstance(deep.Thing(), user.Thing) and not isinstance(5, user.Thing)


def test_others_import_the_package_itself(packages):
    user = imported()
    heavy = importlib.import_module("heavy")
    assert vars(heavy)["NUMBER"] == 7 and user.h is not heavy
    heavy.NUMBER = 8
    assert user.h.NUMBER == 8


def test_what_uses_the_package_at_once_loads_it(packages):
    assert imported("early_user").number == 7
    assert type(sys.modules["heavy"]).__name__ == "module"


def test_a_name_that_is_not_listed_is_loaded_at_once(packages):
    assert imported(packages=()).double(3) == 6 and loaded()


def test_a_package_that_is_there_already_is_left_alone(packages):
    heavy = importlib.import_module("heavy")
    assert imported().h is heavy


def test_a_name_that_is_not_there_is_an_error_at_use(packages):
    with late_imports({"heavy": ("heavy:missing",)}):
        from heavy import missing
    with pytest.raises(AttributeError, match="missing"):
        missing()


def test_a_required_package_that_is_not_installed_is_an_error_at_use():
    with late_imports({"not_installed_at_all": ()}):
        import not_installed_at_all
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        not_installed_at_all.run()


def test_an_optional_package_that_is_not_installed_names_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ogb"]:
        monkeypatch.delitem(sys.modules, name)
    with late_imports({"ogb": ("ogb.utils:smiles2graph",)}):
        from ogb.utils import smiles2graph
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(UnavailableError, match=r"pip install 'dgl-mgpu\[ogb\]'"):
        smiles2graph("O")


def test_the_import_of_json_is_not_touched(packages):
    imported()
    assert importlib.import_module("json") is json


def test_a_version_that_is_asked_for_at_once_is_the_packages(packages):
    assert imported("early_reader").version == "1.2"
