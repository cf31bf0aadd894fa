"""README.md and docs/ show what the commands print and what the result files say.

Their links and formulas hold. `python -m docs.tools` writes what is generated.
"""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import product
from pathlib import Path

import pytest

from docs.tools import figures
from docs.tools.documents import DOCUMENTS, ROOT, Example, code, examples, is_row, marked, table_at
from docs.tools.result_tables import result_tables
from dynmo.cases import CASES as CASES_OF_DYNAMISM
from dynmo.cost.costs_file import Profile, to_json
from dynmo.cost.layer_cost import LayerCost, LinkCost, split_costs, uniform_costs
from dynmo.schedule.catalogue import SCHEDULES, make, stage_ranks_of
from dynmo.schedule.simulator import Timeline, simulate

pytestmark = pytest.mark.docs

SCHEDULES_PAGE = ROOT / "docs" / "reference" / "schedules.md"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def plain(line: str) -> str:
    """The comparable form of a drawing or a table.

    A drawing is compared to the column. A table is compared by its words, because the times in it
    make its columns wider or narrower.
    """
    return line.strip() if is_row(line) else " ".join(line.split())


ALL = [
    (path, example)
    for path in DOCUMENTS
    for example in examples(path.read_text().splitlines())
    if example.shown
]


@pytest.mark.parametrize(
    ("path", "example"), [pytest.param(p, e, id=f"{_name(p)}:{e.line + 1}") for p, e in ALL]
)
def test_commands_print_the_shown_output(path: Path, example: Example) -> None:
    shown = example.lines(path.read_text().splitlines())
    status, printed = example.run()
    assert status == (2 if shown[-1].strip().startswith("dynmo: ") else 0), printed
    message = (
        f"{_name(path)}, line {example.line + 1}: `{example.command}` prints something else; "
        f"python -m docs.tools writes it"
    )
    if any(map(is_row, shown)):
        assert [plain(line) for line in shown if is_row(line)] == [
            plain(line) for line in printed if is_row(line)
        ], message
    rest = iter(map(plain, printed))
    assert all(plain(line) in rest for line in shown), message


def test_every_schedule_has_a_drawing() -> None:
    text = SCHEDULES_PAGE.read_text().splitlines()
    drawn = {
        e.command.split("--schedule ")[1].split()[0]
        for e in examples(text)
        if any(map(is_row, e.lines(text)))
    }
    assert drawn == set(SCHEDULES)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_have_targets(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    outside = "\n".join(
        line for i, line in enumerate(lines) if not any(i in block for block, _ in code(lines))
    )
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", outside):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{_name(path)} links to {target}"
        if anchor:
            assert anchor in headings(file), f"{_name(path)} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_named_files_exist(path: Path) -> None:
    packages = "|".join(each.parent.name for each in (ROOT / "dynmo").glob("*/__init__.py"))
    pattern = rf"`((?:benchmarks|docs|dynmo|examples|tests|{packages})/[\w/]*(?:\.\w+|/))`"
    for name in re.findall(pattern, path.read_text()):
        assert "NAME" in name or (ROOT / name).exists() or (ROOT / "dynmo" / name).exists(), name


def headings(path: Path) -> set[str]:
    """The headings' anchors as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_tables_match_the_result_files(path: Path) -> None:
    texts = result_tables()
    text = path.read_text().splitlines()
    for line, name in marked(text):
        assert [text[i] for i in table_at(text, line)] == texts[name].splitlines(), (
            f"{_name(path)}: table {name}"
        )


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_figures_match_the_result_files(path: Path) -> None:
    assert not figures.differences(path.read_text()), (
        f"{_name(path)}; python -m docs.tools writes the figures"
    )


def test_each_table_of_a_result_file_is_shown() -> None:
    shown = {name for path in DOCUMENTS for _, name in marked(path.read_text().splitlines())}
    assert set(result_tables()) == shown


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SCHEDULES_PAGE.read_text().splitlines()
    blocks = [
        "\n".join(text[i] for i in block) for block, language in code(text) if language == "python"
    ]
    assert blocks
    for block in blocks:
        exec(compile(block, str(SCHEDULES_PAGE), "exec"), {})


# -- names in the text -----------------------------------------------------------------------------


def test_engine_joins_the_listed_objects() -> None:
    """docs/how-it-works.md lists what `Engine` makes. Records of arguments are no such objects."""
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = text.split("**Objects.**")[1].split("\n\n")[1].splitlines()[2:]
    listed = [re.findall(r"`(\w+(?:/\w+)*)/?`", row)[:2] for row in rows]
    engine = ast.parse((ROOT / "dynmo" / "runtime" / "engine" / "engine.py").read_text())
    home = {
        name.name: node.module.split(".")[1:-1]
        for node in ast.walk(engine)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }
    constructed = [
        call.func.id
        for method in ast.walk(engine)
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for call in sorted(
            (node for node in ast.walk(method) if isinstance(node, ast.Call)),
            key=lambda node: node.lineno,
        )
        if isinstance(call.func, ast.Name)
        and re.fullmatch(r"[A-Z]\w*(?<!Options)(?<!Parts)", call.func.id)
    ]
    assert listed[0] == ["Layout", "plan"]
    assert listed[1:] == [[name, "/".join(home[name])] for name in dict.fromkeys(constructed)]


def test_costs_file_is_documented_with_its_keys() -> None:
    (shown,) = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs" / "reference" / "costs-file.md").read_text(), re.DOTALL
    )
    profile = Profile(
        layers=(LayerCost(1, 1, 1),),
        names=("a",),
        links=(((0, 1), LinkCost(0, 1)),),
        model="gpt",
        microbatch=2,
        microbatches=8,
        ranks=2,
        partition=(1,),
        schedule="zb-h1",
        steps=8,
    )
    assert re.findall(r'"(\w+)":', re.sub(r"\[\{.*\}\]", "", shown)) == list(to_json(profile))


def test_extras_are_named_in_one_way() -> None:
    """Messages name a package, and documents a package or the extra of a checkout that has it."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = {path: path.read_text() for path in (ROOT / "dynmo").rglob("*.py")}
    errors = sources.pop(ROOT / "dynmo" / "errors.py")
    assert "install it with pip install {package}" in errors
    assert not [path for path, text in sources.items() if "pip install" in text]
    known.pop("dev")
    packages = {re.split("[<>=]", each)[0] for extra in known.values() for each in extra}
    used = re.findall(r"not_installed\(['\"]([\w-]+)['\"]\)", "\n".join(sources.values()))
    otel = {each for each in packages if each.startswith("opentelemetry")}
    assert set(used) == packages - {"datasets", "pyarrow", "tensorboard", "wandb"} - otel
    for path in DOCUMENTS:
        for what in re.findall(r"pip install (?:-c \S+ )?([^-\s`][^\s`]*)", path.read_text()):
            asked = [".", "torch", *(f"'.[{extra}]'" for extra in known), *packages]
            assert what in asked, f"{_name(path)}: {what}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_dynamic_case_is_named(page: str) -> None:
    named = {"mixture_of_depths": "depths"}
    text = (ROOT / page).read_text()
    assert all(named.get(case, case).replace("_", " ") in text for case in CASES_OF_DYNAMISM)


# -- the formulas of docs/reference/schedules.md ---------------------------------------------------

CASES = list(product((2, 3, 5, 8), (1, 2, 3), ((1, 1, 1), (4, 5, 3), (5, 4, 3), (8, 9, 2))))


def timeline(name: str, p: int, m: int, f: float, b: float, w: float) -> Timeline:
    costs = split_costs(uniform_costs(p, f, b, w), stage_ranks_of(name, p))
    return simulate(make(name, p, m, costs=costs), costs)


@pytest.mark.parametrize(("p", "times", "costs"), CASES)
def test_formulas_match_the_simulator(p: int, times: int, costs: tuple[int, int, int]) -> None:
    f, b, w = costs
    m = times * p
    work = m * (f + b + w)
    for name in ("gpipe", "1f1b"):
        played = timeline(name, p, m, f, b, w)
        assert played.span == played.makespan == work + (p - 1) * (f + b + w)
        assert played.peak_memory == tuple(m if name == "gpipe" else p - rank for rank in range(p))
    played = timeline("interleaved-1f1b", p, m, f, b, w)
    assert played.span == played.makespan == work + (p - 1) * (f + b + w) / 2
    assert max(played.peak_memory) == min(m, p + (p - 1) / 2)
    if m < 2 * p - 1:
        assert timeline("zb-h1", p, m, f, b, w).span == (m + p - 1) * (f + b) + w
        return
    played = timeline("zb-h1", p, m, f, b, w)
    assert played.span == played.makespan == work + (p - 1) * (f + b - w)
    assert max(played.peak_memory) == p
    played = timeline("zb-h2", p, m, f, b, w)
    assert played.span == work + (p - 1) * (f + b - 2 * w)
    assert played.makespan == work + (p - 1) * max(f, f + b - 2 * w)
    assert max(played.peak_memory) == 2 * p - 1


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 24)])
def test_v_shapes_are_within_their_published_bounds(p: int, m: int) -> None:
    for name, most, over in (("zb-v", p, 0.5), ("v-half", p / 2 + 1, 1.5), ("v-min", p / 3 + 1, 2)):
        times = timeline(name, p, m, 1, 1, 1)
        assert max(times.peak_memory) <= most
        assert times.span <= 3 * m + over * (p - 1)
