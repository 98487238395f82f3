"""Every block of the page of switches runs with its framework, and trains bit for bit as it does without the switch.

A test skips where its framework is not installed. CONTRIBUTING says how to install them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from integration_checks import CLASSES, FEATURES, assert_equal_bits, batches, installed, network, parameters_of
from torch import Tensor, nn
from torch.nn import functional

import backstash as bs
from backstash.errors import IntegrationError, PlanError, UnknownNameError
from backstash.integrations.loop import session_of, unwrap

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "switches.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
LONGEST = 5
"""Lines of an example, blank ones and comments not counted."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own calls


def block(section: str, language: str) -> str:
    """The first block of a section."""
    found = re.search(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run(section: str, **names: Any) -> dict[str, Any]:
    """Runs a section's block of Python with these names there already, and returns its names.

    The budget is that of the plain step, because steps as small as these have little to give.
    """
    text = block(section, "python").replace("60%", "100%")
    exec(compile(text, f"{section}.py", "exec", dont_inherit=True), names)
    return names


def steps(model: nn.Module, count: int = 14) -> list[Tensor]:
    """Trains a model in a loop, and returns all losses and weights."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *parameters_of(model)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert installed() == []


def test_each_row_of_the_table_has_a_section_and_few_lines() -> None:
    for anchor in re.findall(r"\]\(#([\w-]+)\) \|", PAGE):
        assert anchor in {name.lower().replace(" ", "-") for name in SECTIONS}
    for name in SECTIONS:
        lines = re.findall(r"^```\w+\n(.*?)^```$", SECTIONS[name], re.MULTILINE | re.DOTALL)[0].splitlines()
        assert len([line for line in lines if line.strip()]) <= LONGEST, name


# -- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer_parts(tmp_path: Path) -> Any:
    """Returns what a trainer takes: a model, the command line, data."""
    pytest.importorskip("transformers", reason="needs transformers")
    import test_huggingface

    options = f"--output_dir {tmp_path} --max_steps 14 --per_device_train_batch_size 4 --logging_steps 1 --use_cpu"
    words = [
        *options.split(),
        *["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true", "--seed", "5"],
    ]
    return SimpleNamespace(
        hf=test_huggingface, words=words, model=test_huggingface.model, data=test_huggingface.examples(16)
    )


@pytest.mark.parametrize(
    ("switch", "kind"),
    [([], "Session"), (["--backstash_budget", "100%"], "Budgeted"), (["--backstash_policy", "plain"], None)],
)
def test_hugging_face_arguments(
    switch: list[str], kind: str | None, trainer_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    names = {"HfArgumentParser": HfArgumentParser, "TrainingArguments": TrainingArguments, "Trainer": Trainer}

    def trained(words: list[str]) -> Any:
        monkeypatch.setattr(sys, "argv", ["train.py", *trainer_parts.words, *words])
        made = run("Hugging Face arguments", model=trainer_parts.model(), data=trainer_parts.data, **names)["trainer"]
        trainer_parts.hf.train(made)
        return made

    switched, plain = trained(switch), trained(["--backstash_policy", "plain"])
    assert_equal_bits(trainer_parts.hf.outcome(plain), trainer_parts.hf.outcome(switched))
    found = [one for one in switched.callback_handler.callbacks if hasattr(one, "session")]
    assert [type(one.session).__name__ for one in found] == ([] if kind is None else [kind])


def test_hugging_face_arguments_explain_themselves(trainer_parts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import HfArgumentParser

    from backstash.integrations.huggingface import BackstashArguments

    with pytest.raises(SystemExit):
        HfArgumentParser(BackstashArguments).parse_args_into_dataclasses(["--help"])
    assert "such as 2GiB or 60%: backstash plans for it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"backstash_policy": "none"}, UnknownNameError), ({"backstash_budget": "much"}, PlanError)],
)
def test_hugging_face_arguments_that_mean_nothing(
    arguments: dict[str, str], error: type[Exception], trainer_parts: Any, tmp_path: Path
) -> None:
    from backstash.integrations.huggingface import BackstashArguments

    with pytest.raises(error):
        BackstashArguments(**arguments).attach(trainer_parts.hf.trainer(tmp_path))


def test_a_policy_and_a_budget_are_refused(trainer_parts: Any, tmp_path: Path) -> None:
    from backstash.integrations.huggingface import BackstashArguments

    with pytest.raises(IntegrationError, match="leave policy= out|Leave policy= out"):
        BackstashArguments("offload", "60%").attach(trainer_parts.hf.trainer(tmp_path))


@pytest.mark.slow
def test_trl(tmp_path: Path) -> None:
    """The trainers themselves are in test_trl.py; this is the page's block."""
    pytest.importorskip("trl", reason="needs trl")
    import test_trl

    def settings() -> dict[str, Any]:
        made = test_trl.trainer("sft", tmp_path, gradient_checkpointing=False, max_steps=14)
        return {"model": made.model, "arguments": made.args, "data": made.train_dataset}

    def make(**names: Any) -> Any:
        class Trainer(test_trl.SFTTrainer):  # a tokenizer cannot be looked up here by the name of a model
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, processing_class=test_trl.tokenizer(), **kwargs)

        return run("TRL", SFTTrainer=Trainer, **names)["trainer"]

    plain = make(**settings())
    from backstash.integrations.huggingface import detach

    detach(plain)
    assert_equal_bits(test_trl.train(plain), test_trl.train(make(**settings())))


# -- Axolotl -------------------------------------------------------------------------------------------------------


def test_axolotl(trainer_parts: Any, tmp_path: Path) -> None:
    pytest.importorskip("axolotl.integrations.base", reason="needs axolotl")
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    settings = yaml.safe_load(block("Axolotl", "yaml"))
    manager = PluginManager.get_instance()
    for plugin in settings["plugins"]:
        manager.register(plugin)
    (path,) = manager.get_input_args()
    import importlib

    module, _, name = path.rpartition(".")
    checked = getattr(importlib.import_module(module), name)(**settings).model_dump()
    checked["backstash_options"] = {"min_nbytes": 0, "print_report": False}
    plain, attached = (trainer_parts.hf.trainer(tmp_path, max_steps=14) for _ in range(2))
    manager.post_trainer_create(DictDefault(checked | {"backstash_budget": "100%"}), attached)
    trainer_parts.hf.train(plain)
    trainer_parts.hf.train(attached)
    assert_equal_bits(trainer_parts.hf.outcome(plain), trainer_parts.hf.outcome(attached))
    (found,) = [one for one in attached.callback_handler.callbacks if hasattr(one, "session")]
    assert isinstance(found.session, bs.Budgeted)
    assert checked["backstash_budget"] == "60%"


# -- Lightning CLI -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lightning_cli(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    pytest.importorskip("jsonargparse", reason="needs jsonargparse")
    import test_lightning
    from lightning.pytorch.cli import LightningCLI

    def trained(settings: dict[str, Any]) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        settings["trainer"] |= {**quiet, "enable_model_summary": False, "accelerator": "cpu"}
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({"seed_everything": 1, **settings}))
        torch.manual_seed(1)
        cli = LightningCLI(test_lightning.Module, run=False, args=["--config", str(file)], save_config_callback=None)
        cli.trainer.fit(cli.model, test_lightning.data(14))
        return cli

    settings = yaml.safe_load(block("Lightning CLI", "yaml"))
    settings["trainer"]["callbacks"][0]["init_args"]["budget"] = "100%"
    switched, plain = trained(settings), trained({"trainer": {}})
    assert_equal_bits(parameters_of(plain.model), parameters_of(switched.model))
    (found,) = [one for one in switched.trainer.callbacks if hasattr(one, "session")]
    assert isinstance(found.session, bs.Budgeted)


# -- accelerate launch ---------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
layers = (layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU()))
model = torch.nn.Sequential(*layers)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(40):
    loss = model(torch.ones(512, 256)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump({**settings, "mixed_precision": "no"}))
    program, *words = block("accelerate launch", "console").strip().removeprefix("$ ").replace("60%", "90%").split()
    assert program == "accelerate"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^backstash: budget .* planned", done.stdout, re.MULTILINE)


# -- configurations that name a component --------------------------------------------------------------------------


def test_a_component_is_wrapped() -> None:
    from backstash.integrations.components import wrapped_model

    built = wrapped_model(builder="integration_checks.network", budget="100%", min_nbytes=0)
    assert_equal_bits(steps(network()), steps(built))
    assert isinstance(session_of(built), bs.Budgeted)


@pytest.mark.parametrize("path", ["torch.nn.Lineal", "no_such_module.Model", "", "torch.nn.", "a b", 3, None])
def test_a_builder_that_is_not_there(path: Any) -> None:
    from backstash.integrations.components import wrapped_model

    with pytest.raises(IntegrationError, match="dotted path"):
        wrapped_model(builder=path)


def test_a_builder_that_builds_no_module() -> None:
    from backstash.integrations.components import wrapped_model

    with pytest.raises(IntegrationError, match="has returned a dict"):
        wrapped_model(builder="builtins.dict")


def test_torchtune() -> None:
    pytest.importorskip("torchtune", reason="needs torchtune")
    pytest.importorskip("omegaconf", reason="needs omegaconf")
    from omegaconf import OmegaConf
    from torchtune import config, training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    written = yaml.safe_load(block("torchtune", "yaml"))["model"]
    sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32}
    switched = OmegaConf.create(written | {"builder": "torchtune.models.llama3.llama3", "budget": "100%", **sizes})
    plain = OmegaConf.create({"_component_": "torchtune.models.llama3.llama3", **sizes})
    assert callable(config._utils._get_component_from_path(written["builder"])), "the page names what there is"

    def trained(settings: Any) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        with training.set_default_dtype(torch.float32), torch.device("cpu"):  # from here as the recipe does it
            model = config.instantiate(settings)
        training.set_activation_checkpointing(model, auto_wrap_policy=set())
        model.load_state_dict(model.state_dict())
        loss_fn = CEWithChunkedOutputLoss()
        model.set_num_output_chunks(loss_fn.num_output_chunks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(14):
            tokens = torch.randint(64, (4, 32))
            loss = loss_fn(model(tokens=tokens), tokens.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return model, [*losses, *parameters_of(model)]

    (wrapped, found), (_, expected) = trained(switched), trained(plain)
    assert_equal_bits(expected, found)
    assert isinstance(session_of(wrapped), bs.Budgeted)


def test_hydra() -> None:
    hydra = pytest.importorskip("hydra.utils", reason="needs hydra-core")
    model = hydra.instantiate(yaml.safe_load(block("Hydra", "yaml"))["model"])
    assert isinstance(model, nn.Linear) and isinstance(session_of(model), bs.Budgeted)


# -- torchtitan ----------------------------------------------------------------------------------------------------


@pytest.fixture
def titan() -> Any:
    """Returns a configuration of a model that keeps torchtitan's protocol."""
    pytest.importorskip("torchtitan.protocols.model", reason="needs torchtitan")
    from dataclasses import dataclass

    from torchtitan.models.common import Linear
    from torchtitan.protocols.model import BaseModel

    class Tiny(BaseModel):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseModel.Config):
            up: Any
            down: Any

            def update_from_config(self, *, config: Any, **kwargs: Any) -> None: ...

            def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
                return 0, 0

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.up, self.down = config.up.build(), config.down.build()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    normal = {"weight": lambda weight: nn.init.normal_(weight, std=0.1)}
    sizes = ((FEATURES, 256), (256, CLASSES))
    up, down = (Linear.Config(in_features=n, out_features=m, bias=False, param_init=normal) for n, m in sizes)
    return Tiny.Config(up=up, down=down)


def test_torchtitan(titan: Any) -> None:
    from backstash.integrations.torchtitan import BackstashConverter

    def trained(config: Any) -> tuple[nn.Module, list[Tensor]]:  # as its trainer does it
        torch.manual_seed(0)
        with torch.device("meta"):
            model = config.build()
        model.verify_module_protocol()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        return model, steps(model)

    converted = BackstashConverter.Config(budget="100%", min_nbytes=0).build().convert(titan)
    assert isinstance(converted, type(titan)) and converted.to_dict() == titan.to_dict()
    (wrapped, found), (_, expected) = trained(converted), trained(titan)
    assert_equal_bits(expected, found)
    session = session_of(wrapped)
    assert isinstance(session, bs.Budgeted) and session.found.plans > 0
    with pytest.raises(PlanError):
        BackstashConverter.Config(budget="much").build()


def test_torchtitan_as_on_the_page() -> None:
    registry = pytest.importorskip("torchtitan.models.llama3", reason="needs torchtitan").model_registry
    spec = run("torchtitan", model_registry=registry)["model_spec"]
    with torch.device("meta"):
        assert isinstance(session_of(spec.model.build()), bs.Budgeted)


# -- fastai --------------------------------------------------------------------------------------------------------


@pytest.fixture
def learner() -> Callable[..., Any]:
    if "torchvision" not in sys.modules:  # fastai imports it; a build for another torch lacks its operators
        library = torch.library.Library("torchvision", "FRAGMENT")
        if not hasattr(torch.ops.torchvision, "nms"):
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    module = pytest.importorskip("fastai.learner", reason="needs fastai")
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader

    data = [(x[row], y[row]) for x, y in batches(14) for row in range(len(x))]
    dls = DataLoaders(*(DataLoader(data, bs=64, shuffle=False, num_workers=0) for _ in range(2)))

    def make(cbs: Any = None, is_shown: bool = False) -> Any:
        common = {"dls": dls, "model": network(), "loss_func": functional.cross_entropy}
        if is_shown:
            return run("fastai", Learner=module.Learner, **common)["learner"]
        return module.Learner(**common, cbs=cbs)

    return make


def fit(learner: Any) -> list[Tensor]:
    torch.manual_seed(4)
    learner.fit(1, lr=0.1)
    return parameters_of(learner.model)


def test_fastai(learner: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    from backstash.integrations.fastai import BackstashCallback

    callback = BackstashCallback(min_nbytes=0)
    switched = learner(cbs=callback)
    assert_equal_bits(fit(learner()), fit(switched))
    assert "\nactivations " in capsys.readouterr().out
    assert callback.report().steps == 14 and callback.report().ratio > 1
    trained, validated = switched.model.was_open[:14], switched.model.was_open[14:]
    assert all(trained) and validated and not any(validated)
    with pytest.raises(IntegrationError, match="not wrapped"):
        unwrap(switched.model)


def test_fastai_as_on_the_page(learner: Callable[..., Any]) -> None:
    made = learner(is_shown=True)
    (callback,) = [one for one in made.cbs if hasattr(one, "session")]
    assert_equal_bits(fit(learner()), fit(made))
    assert isinstance(callback.session, bs.Budgeted)


def test_fastai_goes_on_after_an_error(learner: Callable[..., Any]) -> None:
    from backstash.integrations.fastai import BackstashCallback

    callback = BackstashCallback(min_nbytes=0, print_report=False)
    with pytest.raises(IntegrationError, match="nothing was fitted"):
        callback.report()
    made = learner(cbs=callback)
    made.model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fit(made)
    assert installed() == []
    made.model.error = None
    made.model.load_state_dict(network().state_dict())
    made.create_opt()
    assert_equal_bits(fit(learner()), fit(made))


def test_fastai_refuses_what_means_nothing(learner: Callable[..., Any]) -> None:
    from backstash.integrations.fastai import BackstashCallback

    with pytest.raises(UnknownNameError):
        BackstashCallback("none")
    with pytest.raises(PlanError):
        BackstashCallback(budget="much")


# -- Keras ---------------------------------------------------------------------------------------------------------


def test_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="needs keras")
    if keras.backend.backend() != "torch":
        pytest.skip("keras was imported with another backend")

    def parts() -> dict[str, Any]:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        hidden = (layers.Dense(96, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.2))
        model = keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])
        x = torch.cat([x for x, _ in batches(7)])
        return {"model": model, "x": x.numpy(), "y": x[:, :CLASSES].numpy()}

    def trained(wrap: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        made = parts()
        model = made["model"]
        fit, histories = model.fit, []
        model.__dict__["fit"] = lambda x, y: histories.append(fit(x, y, shuffle=False, verbose=0, validation_split=0.1))
        run("Keras on torch", bs=SimpleNamespace(wrap=wrap), **made)
        logged = [value for values in histories[0].history.values() for value in values]
        return model, [torch.tensor(logged), *(torch.tensor(one) for one in model.get_weights())]

    _, expected = trained(lambda model, **options: model)
    session, found = trained(lambda model, **options: bs.wrap(model, min_nbytes=0))
    assert_equal_bits(expected, found)
    assert session_of(session).report().ratio > 1
    budgeted, found = trained(lambda model, budget: bs.wrap(model, budget=budget, min_nbytes=0))
    assert_equal_bits(expected, found)
    assert session_of(budgeted).found.plans > 0
