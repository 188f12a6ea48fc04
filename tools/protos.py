"""Generate the committed stubs in stagemesh/rpc/v1 from protos/.

`python -m tools.protos` writes them in place; `--out DIR` writes them elsewhere (the freshness test
does that and compares). The proto path equals the Python path, so no import is rewritten.
"""

import argparse
import sys
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> None:
    """Compile every .proto below protos/ into `out`.

    Raises:
        RuntimeError: when protoc reports an error (its text is on standard error).
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    # protoc finds the mypy plugins on PATH; in an inactive virtual environment they are not there.
    plugins = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {', '.join(sources)}")


def main() -> None:
    """Parse the command line and generate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="folder to write below")
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
