"""Export in the layout of Hugging Face: `from_pretrained` loads the folder, and each file of weights is identified."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.exchange import export
from dlac_pipeline.extensions.exchange.export import export_weights
from dlac_pipeline.extensions.exchange.exported_files import checkpoint_of_file
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena
from tests.fixtures import Command

transformers: Any = pytest.importorskip("transformers")
TOKENS = torch.arange(24).reshape(2, 12)


def make_model(kind: str) -> Any:
    """Return a tiny causal language model with random weights. Embedding and head of `tied` are one tensor."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "tied"}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads))


def train(arena: Arena, spec: JobSpec, model: Any) -> None:
    """Train two steps in this process."""
    with arena.training_run(spec) as run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.restore(model=model, optimizer=optimizer)
        for _ in run.batches():
            loss = model(TOKENS, labels=TOKENS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss.detach())


def trained(arena: Arena, kind: str, **changes: Any) -> tuple[JobSpec, Any]:
    """Return the spec and the model of a run of two steps, with the model's configuration in the folder `config`."""
    arena.table(appends=(64,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=1, **changes)
    model = make_model(kind)
    start = model.lm_head.weight.detach().clone()
    train(arena, spec, model)
    assert not torch.equal(model.lm_head.weight, start)
    model.config.save_pretrained(arena.home / "config")
    return spec, model


def logits(model: Any) -> torch.Tensor:
    """Return what the model gives for the tokens, without dropout."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize(("kind", "engine"), [("tied", "dcp"), pytest.param("untied", "torch", marks=pytest.mark.slow)])
def test_pretrained_model_has_equal_logits(arena: Arena, here: Command, kind: str, engine: str) -> None:
    """One file of weights equals the trained model bit for bit, and its digest leads to the checkpoint."""
    _, model = trained(arena, kind, engine=engine)
    (arena.home / "config" / "tokenizer.json").write_text("{}")
    for other in ("adapter_config.json", "trainer_state.json", "train.py", "requirements.txt"):
        (arena.home / "config" / other).write_text("{}")
    path = arena.home / "config" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))  # of the pretrained model
    (arena.home / "config" / "pytorch_model.bin").write_bytes(b"old weights")
    out = arena.home / "out" / "my-model"
    arguments = ("checkpoint", "export", "r", str(out), "--config", str(arena.home / "config"), "--json")
    done = here(*arguments, "--spec", str(arena.home / "r.yaml"), home=arena.home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == ["model.safetensors"]
    expected = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert expected - {"generation_config.json"} <= set(os.listdir(out)) <= expected
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(loaded), logits(model))
    assert checkpoint_of_file(arena.lakehouse, out / "model.safetensors")["checkpoint_id"] == arena.head("r")
    assert os.listdir(out.parent) == ["my-model"]


def test_large_model_has_an_index(arena: Arena) -> None:
    """Several files of weights load as one does. The ledger knows every file and the index."""
    spec, model = trained(arena, "untied")
    arena.monkeypatch.setattr(export, "SHARD_BYTES", 6000)
    out = arena.home / "my-model"
    made = export_weights(arena.lakehouse, tiers_of(spec), out, config=arena.home / "config")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(made.files) == [*files, "model.safetensors.index.json"]
    assert max((out / name).stat().st_size for name in files) < 8000
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(out)), logits(model))
    for name in made.files:
        assert checkpoint_of_file(arena.lakehouse, out / name)["checkpoint_id"] == made.checkpoint_id, name
    assert len(arena.rows("r", ExportRow)) == len(made.files)


def test_unsuitable_folder_is_refused(arena: Arena, small_disk: Path) -> None:
    """A folder with files, a file, a mount point and a configuration without config.json or of a quantized model."""
    spec, _ = trained(arena, "untied")
    tiers, config = tiers_of(spec), arena.home / "config"
    out = arena.home / "out"
    out.mkdir()
    (out / "mine").touch()
    for path in (out, out / "mine", small_disk):
        with pytest.raises(SpecInvalid, match="new or empty folder to write, no mount point"):
            export_weights(arena.lakehouse, tiers, path, config=config)
    with pytest.raises(SpecInvalid, match=r"config\.json of a model, found none in '.*out'"):
        export_weights(arena.lakehouse, tiers, arena.home / "new", config=out)
    (quantized := arena.home / "quantized").mkdir()
    (quantized / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(SpecInvalid, match=r"without quantization_config in '.*quantized'"):
        export_weights(arena.lakehouse, tiers, arena.home / "new", config=quantized)
    assert os.listdir(out) == ["mine"]
    assert not (arena.home / "new").exists()
    assert arena.rows("r", ExportRow) == []
