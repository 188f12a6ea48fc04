"""The committed stubs are what the generator makes of protos/, with the oldest versions allowed."""

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from stagemesh.rpc.v1 import comm_pb2, common_pb2, coordinator_pb2, node_pb2, tensor_pb2
from tools import protos

STUBS = protos.ROOT / "stagemesh" / "rpc" / "v1"
FILES = (comm_pb2, common_pb2, coordinator_pb2, node_pb2, tensor_pb2)


def _stub_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if re.search(r"_pb2(_grpc)?\.pyi?$", path.name)
    }


def _project() -> dict:
    return tomllib.loads((protos.ROOT / "pyproject.toml").read_text())


def _floor(package: str) -> str:
    for requirement in _project()["project"]["dependencies"]:
        match = re.fullmatch(rf"{package}>=([\d.]+)", requirement)
        if match:
            return match[1]
    pytest.fail(f"pyproject.toml has no floor for {package}")


def test_committed_stubs_are_fresh(tmp_path):
    protos.generate(tmp_path)
    generated = _stub_files(tmp_path / "stagemesh" / "rpc" / "v1")
    committed = _stub_files(STUBS)
    assert generated.keys() == committed.keys()
    assert len(generated) == 4 * len(list(protos.PROTOS.rglob("*.proto")))
    stale = [name for name, data in generated.items() if data != committed[name]]
    assert not stale, f"{stale} differ from protos/: run python -m tools.protos"


def test_generator_reports_a_broken_proto(tmp_path, monkeypatch, capfd):
    bad = tmp_path / "protos" / "bad.proto"
    bad.parent.mkdir()
    bad.write_text('syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }')
    monkeypatch.setattr(protos, "PROTOS", bad.parent)
    with pytest.raises(RuntimeError, match=r"bad\.proto"):
        protos.generate(tmp_path / "out")
    assert "bad.proto" in capfd.readouterr().err


@pytest.mark.parametrize("plugin", ["protoc-gen-mypy", "protoc-gen-mypy_grpc"])
def test_protoc_plugins_are_beside_the_interpreter(plugin):
    assert (Path(sys.executable).parent / plugin).is_file()


def test_stub_heads_name_the_floors_of_the_dependencies():
    for name, data in _stub_files(STUBS).items():
        text = data.decode()
        if name.endswith("_pb2.py"):
            assert re.search(r"# Protobuf Python Version: ([\d.]+)", text)[1] == _floor("protobuf")
        if name.endswith("_pb2_grpc.py"):
            assert re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)[1] == _floor("grpcio")


def test_generator_is_pinned_to_the_floor():
    pins = [r for r in _project()["dependency-groups"]["dev"] if r.startswith("grpcio-tools")]
    assert pins == [f"grpcio-tools=={_floor('grpcio')}"]
    assert version("grpcio-tools") == _floor("grpcio")


def test_package_has_a_version_and_enums_begin_with_unspecified():
    for module in FILES:
        assert module.DESCRIPTOR.package == "stagemesh.rpc.v1"
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
