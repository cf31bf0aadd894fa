"""The code of README.md, the tutorial, the how-to guides and the pages of cases runs.

The code imports `dynmo` and torch only.
"""

from __future__ import annotations

import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.cost.layer_cost import uniform_costs
from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.models.model import from_factories
from dynmo.plan import balancers
from dynmo.runtime.state.save import save as save_checkpoint
from dynmo.schedule import catalogue
from dynmo.schedule.op import validate
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of, plan_run
from tests.cli.runs import free_port
from tests.combinations import mostly_matrix
from tests.plan.test_balancers import FROZEN, now
from tests.runtime.alone import pipeline, run_step, tokens

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TUTORIAL, HOW_TO = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "how-to"
REFERENCE = ROOT / "docs" / "reference"
CASES = sorted(
    {*(ROOT / "docs" / "cases").glob("*.md"), *(ROOT / "dynmo" / "cases").glob("*/README.md")}
    - {ROOT / "docs" / "cases" / "index.md"}
)
PAGES = [
    ROOT / "README.md",
    TUTORIAL,
    *CASES,
    *sorted(HOW_TO.glob("*.md")),
    *(REFERENCE / f"{name}.md" for name in ("checkpoint-files", "python", "layers", "own-case")),
]
OTHERS = {"transformers", "dynmo", "torch", "safetensors", "my_model"}
WHOLE_TOML = [
    (ROOT / "README.md", ""),
    (TUTORIAL, "# first.toml"),
    (TUTORIAL, "# run.toml"),
    (HOW_TO / "own-data.md", ""),
    (HOW_TO / "hugging-face.md", ""),
    *((page, "") for page in CASES),
]


def block(page: Path, kind: str, start: str = "") -> str:
    """The page's first block of code of this kind that begins so."""
    code = re.search(rf"```{kind}\n({re.escape(start)}.*?)```", page.read_text(), re.DOTALL)
    assert code is not None, f"{page.name} has no such block: {start}"
    return code[1]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The working folder, which has `my_model.py`, as a world of one rank.

    No launcher has started the world.
    """
    for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_model.py").write_text(block(TUTORIAL, "python", "# my_model.py"))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    yield tmp_path
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_imports_only_dynmo_and_torch(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        imported = re.findall(r"^\s*(?:import|from) (\S+)", code, re.MULTILINE)
        assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) <= OTHERS
        assert {name for name in imported if name.startswith("dynmo.")} <= {"dynmo.extend"}


@pytest.mark.parametrize(("page", "start"), WHOLE_TOML)
def test_configurations_are_valid(page: Path, start: str) -> None:
    parse(tomllib.loads(block(page, "toml", start)))


def test_readme_loop_saves_a_checkpoint(folder: Path) -> None:
    exec(block(ROOT / "README.md", "python"), {})
    assert (folder / "checkpoint" / "latest").read_text() == "step-000020"


@pytest.mark.parametrize(
    "launched", mostly_matrix([False, True], everyday=[True]), ids=["alone", "torchrun"]
)
def test_tutorial_loop_freezes_layers_on_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    launched: bool,
) -> None:
    """The loop runs on one rank in this process. Layers are frozen after 12 steps."""
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for key, value in world.items():
        if launched:
            monkeypatch.setenv(key, value)
    exec(block(TUTORIAL, "python", "# loop.py").replace("range(30)", "range(12)"), {})
    assert re.fullmatch(
        r"step 10: loss \d\.\d{4}, layers \(8,\)\nweights [0-9a-f]{16}\n", capsys.readouterr().out
    )


def test_tutorial_loop_resumes_from_its_checkpoint(folder: Path) -> None:
    """Two loops of three steps end like one loop of six steps."""
    code = block(TUTORIAL, "python", "# loop.py")
    saving = block(TUTORIAL, "python", "    if Path")
    head, inner = code.split("    for step in range(30):\n")
    load, save = saving.split("    for step in range(pipeline.steps, 60):\n        ...\n")
    ends: list[Any] = []
    namespace: dict[str, Any] = {}
    for name, stops in (("cut", (3, 6)), ("whole", (6,))):
        for stop in stops:
            loop = f"{load}    for step in range(pipeline.steps, {stop}):\n{inner}{save}".replace(
                '"checkpoint"', f'"{name}"'
            )
            namespace = {}
            exec(head + loop, namespace)
        ends.append((namespace["result"].loss, namespace["weights"]))
    assert ends[0] == ends[1]


def test_numbers_of_a_step_are_written(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    exec(block(REFERENCE / "python.md", "python", "# table.py"), {})
    assert re.fullmatch(r"\(\d+,\) [\d.]+ None\n", capsys.readouterr().out)
    assert len((folder / "numbers.csv").read_text().splitlines()) == 2


def test_hugging_face_loop_saves_a_model(
    capsys: pytest.CaptureFixture[str], folder: Path, small_llama: Path
) -> None:
    (folder / "my-model").symlink_to(small_llama)
    exec(block(HOW_TO / "hugging-face.md", "python"), {})
    assert re.match(r"(\d+\.\d+\n){10}tensor", capsys.readouterr().out)
    assert (folder / "tuned" / "model.safetensors").is_file()


def test_loader_example_saves_its_position(folder: Path, small_llama: Path) -> None:
    (folder / "my-model").symlink_to(small_llama)
    namespace: dict[str, Any] = {}
    exec(block(HOW_TO / "own-data.md", "python", "# loader"), namespace)
    assert namespace["loader"].state_dict()["step"] == namespace["loader"].steps == 16
    assert (folder / "saved" / "step-000016").is_dir()


def test_learning_rate_example_falls_to_zero(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(block(REFERENCE / "python.md", "python"), namespace)
    assert namespace["pipeline"].optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_own_optimizer_example_trains(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(block(HOW_TO / "own-optimizer.md", "python"), namespace)
    groups = namespace["pipeline"].optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([1e-2 / 6, 1e-3 / 6])
    assert namespace["result"].loss < 0.3


def test_own_balancer_example_places_layers() -> None:
    namespace: dict[str, Any] = {}
    exec(block(HOW_TO / "own-balancer.md", "python", "# my_balancer.py\n"), namespace)
    sizes = (3, 1, 1, 1, 1, 1)
    layers = tuple(dynmo.LayerCost(1.0, 1.0, 1.0, weight_bytes=size) for size in sizes)
    problem, plan = now(layers, (4, 2))
    assert namespace["by_bytes"](problem, plan).counts == (2, 4)
    assert namespace["one_step"](problem, plan).counts == (3, 3)


def test_own_case_example_freezes_layers(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(block(HOW_TO / "own-case.md", "python", "# my_case.py"), namespace)
    with dynmo.init(device="cpu") as namespace["world"]:
        layers = [nn.Linear(4, 4) for _ in range(4)]
        namespace |= {
            "dynmo": dynmo,
            "model": dynmo.Sequential(layers, loss=nn.functional.mse_loss),
        }
        exec(block(HOW_TO / "own-case.md", "python", "pipeline"), namespace)
        before = [layer.weight.detach().clone() for layer in layers]
        for step in range(11):
            namespace["pipeline"].step(torch.ones(8, 4), torch.zeros(8, 4))
            if step == 4:
                assert not torch.equal(before[0], layers[0].weight)
                before = [layer.weight.detach().clone() for layer in layers]
    assert [torch.equal(old, layer.weight) for old, layer in zip(before, layers, strict=True)] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("page", CASES, ids=lambda page: page.name)
def test_case_page_makes_a_pipeline(page: Path, folder: Path) -> None:
    layers = [nn.Linear(4, 4) for _ in range(10)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    with dynmo.init(device="cpu") as world:
        namespace = {"dynmo": dynmo, "model": model, "world": world}
        exec(block(page, "python").replace("replicas=2, expert=2, ", ""), namespace)
        assert namespace["pipeline"].steps == 0


def test_weights_are_saved_and_loaded(folder: Path) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model, world, microbatches=2)
        code = block(HOW_TO / "checkpoints.md", "python", "state = pipeline")
        exec(code, {"torch": torch, "world": world, "pipeline": pipeline})
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(torch.load("weights.pt"))
    assert torch.equal(plain(torch.ones(4)), nn.Sequential(*layers)(torch.ones(4)))


def test_tutorial_model_is_causal() -> None:
    parsed = parse(tomllib.loads(block(TUTORIAL, "toml", "# run.toml")))
    namespace: dict[str, Any] = {}
    exec(block(TUTORIAL, "python", "# my_model.py"), namespace)
    model = nn.Sequential(*namespace["layers"]()).eval()
    ids = torch.arange(parsed.model.sequence)[None]
    other = ids.clone()
    other[0, 9:] += 100
    assert torch.equal(model(ids)[0, :9], model(other)[0, :9])
    assert not torch.equal(model(ids)[0, 9], model(other)[0, 9])


def test_checkpoint_exports_weights_and_a_model_loads_them(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The checkpoint of a run becomes a state_dict, and a new model loads it.

    Loading also works on the meta device, without a warning.
    """
    (folder / "my_start.py").write_text(
        block(REFERENCE / "checkpoint-files.md", "python", "# my_start.py")
    )
    monkeypatch.delitem(sys.modules, "my_start", raising=False)
    given = tomllib.loads(block(TUTORIAL, "toml", "# run.toml"))
    config = parse(given)
    own = parse(given | {"model": given["model"] | {"kind": "python:my_start:layers"}})
    trained = pipeline(model_of(config))
    run_step(trained, 0, *tokens(0, sequence=64), lr=0.1)
    layers = [
        (i, (module, optimizer.state())) for i, (module, optimizer) in trained.store.own.items()
    ]
    save_checkpoint(
        trained.store.world,
        Path("runs/my-run/checkpoints"),
        1,
        trained.model.names,
        layers,
        {},
        keep=1,
    )
    wanted = nn.Sequential(*trained.store.modules).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        weights = nn.Sequential(*model_of(own).build(range(8))).state_dict()
        plan_run(own)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[key], wanted[key]) for key in wanted)


def test_auxiliary_loss_reaches_every_layer() -> None:
    """The auxiliary loss is the last layer's second output.

    Both losses reach every layer.
    """

    class Part(nn.Module):
        def __init__(self, ids: int, out: int) -> None:
            super().__init__()
            self.line = nn.Embedding(ids, out) if ids else nn.Linear(8, out)

        def forward(
            self, x: torch.Tensor, auxiliary: torch.Tensor | float = 0.0
        ) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.line(x)
            return y, y.square().mean() + auxiliary

    namespace: dict[str, Any] = {}
    exec(block(REFERENCE / "layers.md", "python", "# auxiliary loss"), namespace)
    model = from_factories(
        "abc",
        [lambda: Part(256, 8), lambda: Part(0, 8), lambda: Part(0, 256)],
        0,
        namespace["loss"],
    )
    layers, (inputs, targets) = nn.Sequential(*model.build(range(3))), tokens(0)
    wanted = 0.0
    for x, y in zip(inputs, targets, strict=True):
        out = layers[2](*layers[1](*layers[0](x)))
        wanted += namespace["loss"](out, y).item() / len(inputs)
    assert run_step(pipeline(model), 0, inputs, targets, lr=0.1).loss == pytest.approx(wanted)


def contributed(module: ModuleType | None, start: str) -> dict[str, Any]:
    """The names of a module once the code of CONTRIBUTING.md is added to it."""
    names = dict(vars(module)) if module else {"__name__": "contributed"}
    exec(block(CONTRIBUTING, "python", f"# dynmo/{start}"), names)
    return names


def test_contributed_schedule_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    names = contributed(catalogue, "schedule/catalogue.py")
    monkeypatch.setitem(catalogue.SCHEDULES, "eager-1f1b", catalogue._Entry(names["_eager"]))
    made = [catalogue.make(name, 4, 8) for name in ("eager-1f1b", "1f1b")]
    validate(made[0])
    costs = uniform_costs(4, 1, 1, 1, 0.5)
    assert [simulate(schedule, costs).span for schedule in made] == [36, 41]


def test_contributed_balancer_balances() -> None:
    names = contributed(balancers, "plan/balancers.py")
    assert names["_greedy"](*now(FROZEN, (1, 5))).counts == (4, 2)


def test_contributed_case_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "dynmo.cases.freeze_front"
    for name in ("options", "case"):
        module = ModuleType(f"{folder}.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(contributed(None, f"cases/freeze_front/{name}.py"))
    options = sys.modules[f"{folder}.options"].FreezeFront
    options.__module__ = f"{folder}.options"
    with dynmo.init(device="cpu") as world:
        layers = [nn.Linear(4, 4) for _ in range(3)]
        model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
        cases = [options(every=1, most=2)]
        pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=cases, balance="none")
        for _ in range(3):
            pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
        trains = [part.weight.requires_grad for part in pipeline.mesh.modules.values()]
    assert trains == [False, False, True]


def test_contributed_model_is_built() -> None:
    make = contributed(None, "models/convolutions.py")["make"]
    model = make(dynmo.ModelOptions(blocks=2, hidden=8, heads=1), 0, {})
    assert [type(layer).__name__ for layer in model.build(range(4))] == [
        "Embedding",
        "GatedConvolution",
        "GatedConvolution",
        "Linear",
    ]


def test_class_that_is_registered_leaves_its_weight_to_w() -> None:
    names: dict[str, Any] = {}
    exec(block(REFERENCE / "layers.md", "python", "# a class of your own whose W waits"), names)
    plain, own, tape = names["Scale"](4), names["Scale"](4), WeightTape()
    install(own, tape)
    tape.deferred = True
    x = torch.randn(3, 4)
    for module in (plain, own):
        module(x).square().sum().backward()
    assert own.weight.grad is None
    for work, _ in tape.take():
        work()
    torch.testing.assert_close(own.weight.grad, plain.weight.grad)
