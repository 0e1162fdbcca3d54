"""No line of the program gives a file's content to something that would run or trust it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("predict", "quant", "export", "examples", "csrc")
# Last parts of names of what runs what it is given, wherever it is imported from.
RUNS = {
    *("eval", "exec", "compile", "__import__", "Unpickler", "_Unpickler", "literal_eval"),
    *("execfile", "run_path", "run_module", "exec_module", "load_module", "SourceFileLoader"),
}
# Modules that are nothing but that.
MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("yaml", "code", "codeop", "runpy", "pandas", "jsonpickle"),
}
# Of these modules the functions that unpickle; numpy.load only where allow_pickle is not False.
LOADERS = {"paddle.load", "torch.load", "paddle.framework.load", "paddle.io.load"}
NUMPY_LOADERS = {"np.load", "numpy.load"}
JSON_READERS = {"json.load", "json.loads"}
# Who may call json.loads, and on what: texts that this program or its own library has just made.
OWN_JSON = {
    ("predict/device/library.py", "self.handle.regatta_cpu_info()"),
    ("predict/device/devices.py", "device_library().regatta_device_info()"),
    ("predict/system/guarded.py", "words"),  # guarded_worker.py's reply
    ("predict/system/guarded_worker.py", "sys.argv[1]"),  # guarded.py's settings
    ("predict/system/guarded_worker.py", "source.read(asked)"),  # and its request
    ("predict/text/guides.py", "grammar"),  # a grammar that it made
    ("predict/cli/identity.py", "json.dumps(values, default=dict)"),  # a copy
    ("predict/cli/journal.py", "line"),  # a line that it wrote
    ("quant/state.py", "json.dumps(inputs)"),  # a copy
    ("examples/edited_copies.py", "line"),  # of a file of this repository
}
# Methods of these names that are no builtins: torch's and Paddle's switches of training, patterns.
METHODS = {("eval", 0), ("compile", None)}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    """The name that an expression spells, as np.lib.format.open_memmap; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def problems(source: str, name: str) -> Iterator[str]:
    """What a file does that no file may."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in MODULES:
                    yield f"{name}:{node.lineno} imports {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            if (node.module or "").partition(".")[0] in MODULES or imported & RUNS:
                yield f"{name}:{node.lineno} imports {imported} of {node.module}"
            if node.module == "json" and imported & {"load", "loads"}:
                yield f"{name}:{node.lineno} imports json's readers by their names"
        elif isinstance(node, ast.Call):
            yield from wrong_calls(node, name)


def wrong_calls(node: ast.Call, name: str) -> Iterator[str]:
    called, where = dotted(node.func), f"{name}:{node.lineno}"
    last = called.rpartition(".")[2]
    method = isinstance(node.func, ast.Attribute)
    allowed = method and {(last, len(node.args)), (last, None)} & METHODS
    if last in RUNS and not allowed:
        yield f"{where} calls {called}"
    if called in LOADERS:
        yield f"{where} calls {called}"
    if called in NUMPY_LOADERS and not is_constant(keyword(node, "allow_pickle"), False):
        yield f"{where} calls {called} without allow_pickle=False"
    if not is_constant(keyword(node, "shell"), False) and keyword(node, "shell") is not None:
        yield f"{where} runs a shell"
    if called in ("os.system", "os.popen"):
        yield f"{where} runs a shell"
    if called in JSON_READERS and (name, ast.unparse(node.args[0])) not in OWN_JSON:
        yield f"{where} calls {called} on {ast.unparse(node.args[0])}: take files.read_json"


def test_no_source_unpickles_evaluates_or_reads_json_unchecked() -> None:
    found = [
        problem
        for path in sources()
        for problem in problems(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]
    assert found == []


def test_the_exceptions_are_all_in_use() -> None:
    calls = {
        (str(path.relative_to(ROOT)), ast.unparse(node.args[0]))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and dotted(node.func) in JSON_READERS
    }
    assert calls == OWN_JSON


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "builtins.eval(text)",
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "paddle.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, mmap_mode='r')",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "os.system(text)",
        "json.loads(path.read_text())",
        "from json import loads",
        "compile(text, '', 'exec')",
        "ast.literal_eval(text)",
        "from importlib.machinery import SourceFileLoader",
    ],
)
def test_what_it_looks_for_is_found(line: str) -> None:
    assert list(problems(line, "here.py"))


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "re.compile(x)", "np.load(path, allow_pickle=False)", "run(shell=False)"],
)
def test_what_is_harmless_is_left_alone(line: str) -> None:
    assert not list(problems(line, "here.py"))
