"""``transformers.Trainer`` under the flag that pushes to a hub: what it uploads, byte for byte."""

from __future__ import annotations

import base64
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.adapters.test_transformers_trainer import flag, trained

pytestmark = pytest.mark.filterwarnings("ignore")
_ = flag  # a fixture


class Hub(http.server.ThreadingHTTPServer):
    """The calls that a push makes. Keeps every file of every commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: list[dict[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def all_files(self) -> dict[str, bytes]:
        return {name: data for commit in self.commits for name, data in commit.items()}


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        data = self._body()
        if "/commit/" in self.path:
            rows = [json.loads(line) for line in data.splitlines() if line]
            files = [row["value"] for row in rows if row["key"] == "file"]
            self.server.commits.append(
                {each["path"]: base64.b64decode(each["content"]) for each in files}
            )
            answer: Any = {"commitUrl": f"{self.server.url}/me/it/commit/{1:040x}"}
            answer |= {"commitOid": f"{1:040x}"}
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(data)["files"]]
            answer = {
                "files": [
                    {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
                ]
            }
        else:
            answer = {"url": f"{self.server.url}/me/it", "name": "me/it"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"sha": f"{1:040x}", "siblings": [], "id": "me/it"})

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):  # in chunks
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Transformers pushes there."""
    import transformers.utils.hub as of_transformers
    from huggingface_hub import HfApi

    made = Hub()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    api = HfApi(endpoint=made.url, token="hf_it")
    monkeypatch.setattr(of_transformers, "_hf_api", api)
    yield made
    api.run_as_future(int).result()  # what was to be pushed before is over
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(
    "strategy",
    [
        "checkpoint",
        pytest.param("all_checkpoints", marks=pytest.mark.long),
        pytest.param("every_save", marks=pytest.mark.long),
    ],
)
def test_what_is_pushed_is_whole_real_and_no_pool(tmp_path: Path, hub: Hub, strategy: str) -> None:
    made = trained(
        tmp_path,
        2,
        push_to_hub=True,
        hub_model_id="me/it",
        hub_strategy=strategy,
        hub_always_push=True,
        hub_token="hf_it",
        save_total_limit=1,
    )
    made.push_to_hub()
    files = hub.all_files()
    loaded = safetensors.torch.load(files["model.safetensors"])
    assert all(torch.equal(made.model.state_dict()[name], it) for name, it in loaded.items())
    assert not [name for name in files if ".portus" in name]
    assert [name for name, data in files.items() if reference_in(data)] == []
    folders = {
        "checkpoint": ["last-checkpoint"],
        "all_checkpoints": ["checkpoint-1", "checkpoint-2"],
    }
    for folder in folders.get(strategy, []):
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            assert torch.load(io.BytesIO(files[f"{folder}/{name}"]), weights_only=False)
        assert torch.load(io.BytesIO(files[f"{folder}/optimizer.pt"]))["state"]
    names = {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= names
    assert not (tmp_path / "out" / "checkpoint-1").exists()


def reference_in(data: bytes) -> bool:
    return b"this_is_a_reference" in data
