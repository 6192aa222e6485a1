"""What choosing a backend does to a fresh process."""

from __future__ import annotations

import subprocess
import sys


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_the_base_install_computes_with_numpy() -> None:
    assert run("import sys; sys.modules['numba'] = None; from consistency import vector; print(vector.backend().name)") == "numpy"


def test_importing_the_vector_does_not_import_numba() -> None:
    assert run("import sys; from consistency import vector; vector.backend('numpy'); print('numba' in sys.modules)") == "False"


def test_compiling_reads_no_pickle() -> None:
    program = """
import sys
def refuse(event, arguments):
    if event == "pickle.find_class":
        raise SystemExit(f"a pickle was read: {arguments}")
sys.addaudithook(refuse)
from consistency import vector
print(vector.tensor_entry(bytes(256), "U8", (256,), vector.backend("numba")).entry != "")
"""
    assert run(program) == "True"
