"""Tables of frameworks and libraries: families of transformers, models of torchvision and timm, the examples."""

from __future__ import annotations

from typing import Any

from studies.published.results import kinds, load, machine_line, mib, picture, table


def _bits(row: Any, *names: str) -> str:
    return "same bits" if all(row[name] for name in names) else "**differ**"


def families() -> str:
    """Each family of transformers under lossless."""
    found = load("families-cpu")
    rows = [
        (
            row["family"],
            mib(row["saved_nbytes"]),
            f"{row['ratio']:.2f}",
            mib(row["plain_peak_nbytes"]),
            mib(row["peak_nbytes"]),
            _bits(row, "losses_equal", "gradients_equal"),
        )
        for row in found["families"]
    ]
    size = found["size"]
    about = (
        f"{machine_line('families-cpu')} {size['layers']} layers of width {size['width']}, batch {size['batch']}, "
        f"{size['tokens']} tokens or images of {size['image']} x {size['image']}."
    )
    header = ("family", "saved, MiB", "ratio", "peak, plain, MiB", "peak, MiB", "losses and gradients")
    return f"{about}\n\n{table(header, rows)}"


def session_window() -> str:
    """What a Session gains by staying open after the model's call."""
    rows = [
        (
            row["around"],
            mib(row["saved_nbytes"]) if row["saved_nbytes"] else "-",
            mib(row["stash_nbytes"]) if row["saved_nbytes"] else "-",
            f"{row['peak_nbytes'] / 2**20:.2f}",
        )
        for row in load("families-cpu")["windows"]
    ]
    header = ("the Session is open around", "saved, MiB", "stash, MiB", "peak of the step, MiB")
    return f"{machine_line('families-cpu')}\n\n{table(header, rows)}"


def examples() -> str:
    """Each example with and without backstash."""
    rows = [
        (
            f"`{row['name']}.py`",
            row["framework"],
            f"`{row['line']}`",
            mib(row["saved_nbytes"]),
            f"{row['ratio']:.2f}",
            mib(row["plain_peak_nbytes"]),
            mib(row["peak_nbytes"]),
            _bits(row, "losses_equal", "weights_equal"),
        )
        for row in load("examples-cpu")["examples"]
    ]
    header = (
        *("script", "whose loop", "the line", "saved, MiB", "ratio"),
        *("peak, plain, MiB", "peak, MiB", "losses and weights"),
    )
    return f"{machine_line('examples-cpu')}\n\n{table(header, rows)}"


def demos() -> str:
    """How large each training can become in each way of training it, within its memory."""
    rows = []
    for demo in load("demos-cpu")["demos"]:
        base = next(way["size"] for way in demo["ways"])
        title = f"{demo['title']}: {demo['unit']} in {mib(demo['nbytes'])} MiB"
        for way in demo["ways"]:
            size = f"{way['size']:,}" if way["size"] <= base else f"**{way['size']:,}**"
            bits = "same bits" if way["is_equal"] else "**differ**"
            rows.append((title, way["label"], size, mib(way["peak_nbytes"]), bits))
            title = ""
    header = ("training, and what fits", "way to train", "fits", "counted peak, MiB", "gradients")
    return f"{_demo_line()}\n\n{table(header, rows)}"


def _demo_line() -> str:
    """The machine, and what was not run."""
    missing = load("demos-cpu").get("interrupted")
    return machine_line("demos-cpu") + (f" Ways that are missing were {missing}." if missing else "")


_WAYS = ("plain PyTorch", "lossless", "checkpoint of every block", "moved to a disk", "a plan")
"""How the labels of the ways end, without that of all weights where adapters are trained."""


def demo_sizes() -> str:
    """What fits in each way, a row for each training."""
    rows = []
    for demo in load("demos-cpu")["demos"]:
        sizes = {way["label"].rpartition(", ")[2]: f"{way['size']:,}" for way in demo["ways"]}  # the last of a label
        title = f"{demo['title']}: {demo['unit']} in {mib(demo['nbytes'])} MiB"
        rows.append((f"`{demo['name']}`", title, *(sizes.get(way, "-") for way in _WAYS)))
    return f"{_demo_line()}\n\n{table(('demo', 'what fits', *_WAYS), rows)}"


def demo_picture() -> str:
    """The picture of the first demonstration."""
    return _demo_picture(load("demos-cpu")["demos"][0])


def demo_pictures() -> str:
    """The pictures of all demonstrations."""
    return "\n\n".join(map(_demo_picture, load("demos-cpu")["demos"]))


def _demo_picture(demo: dict[str, Any]) -> str:
    """A demonstration's picture, with what it shows in words."""
    shown = "; ".join(f"{way['label']}: {way['size']:,}" for way in demo["ways"])
    text = f"{demo['title']}, {demo['unit']} in {mib(demo['nbytes'])} MiB: {shown}"
    return f"![{text}](results:{picture('demos-cpu', demo['name']).name})"


_ZOO, _ARCHITECTURES = "zoo-cpu", "zoo-transformers-cpu"


def zoo() -> str:
    """Each model of torchvision and timm beside plain PyTorch; a notice until they were judged."""
    if _ZOO not in kinds():
        return _NOT_JUDGED
    models, rows = load(_ZOO)["models"], []
    for model in models:
        plans = _plans(model)
        reached = [mib(plans[budget]["reached_nbytes"]) if budget in plans else "-" for budget in ("60%", "smallest")]
        peaks = [mib(nbytes) if nbytes else "-" for nbytes in (model["plain_nbytes"], model["lossless_nbytes"])]
        compiled, bits = model["compiled"] or "-", "**differ**" if _differs(model) else "same"
        rows.append((model["library"], model["model"], *peaks, *reached, compiled, bits))
    header = ("library", "model", "plain, MiB", "lossless", "plan, 60 %", "smallest plan", "compiled", "bits")
    return f"{_summary(models)} {machine_line(_ZOO)}\n\n{table(header, rows)}"


def zoo_transformers() -> str:
    """The architectures of transformers beside plain PyTorch, by name; a notice until they were judged."""
    if _ARCHITECTURES not in kinds():
        return _NOT_JUDGED
    models = load(_ARCHITECTURES)["models"]
    names = ", ".join(f"**{model['model']} differs**" if _differs(model) else model["model"] for model in models)
    compiled = [model for model in models if model["compiled"] and ":" not in model["compiled"]]
    treated = sum(bool(model.get("treated")) for model in compiled)
    failed = [model["model"] for model in models if ":" in model["compiled"]]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(model["commit"] for model in compiled))
    about = f"{_summary(models)} {len(compiled)} were compiled as well"
    about += f" (commit {commits}), in {treated} of them a value had another form." if compiled else "."
    if failed:
        about += f" Torch itself does not train these when it has compiled them: {', '.join(failed)}."
    about = f"{about} {machine_line(_ARCHITECTURES)}"
    return f"{about}\n\n{names}."


_NOT_JUDGED = "Not measured yet. The command is `python -m studies.zoo`."


def _plans(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A model's plans by their budgets, but for those that there is no plan for."""
    return {row["budget"]: row for row in model["rows"] if row["reached_nbytes"] is not None}


def _differs(model: dict[str, Any]) -> bool:
    checks = model["differing"]
    return checks is None or any(checks.values()) or any(row["differing"] for row in _plans(model).values())


def _summary(models: list[dict[str, Any]]) -> str:
    plans = [row for model in models for row in _plans(model).values()]
    kept = sum(row["reached_nbytes"] <= row["budget_nbytes"] for row in plans)
    off = max((abs(row["predicted_nbytes"] - row["reached_nbytes"]) for row in plans), default=0)
    equal = sum(not _differs(model) for model in models)
    return (
        f"{equal} of {len(models)} models have the same bits everywhere. {kept} of {len(plans)} plans "
        f"kept their budgets; predicted peaks are off by {off / 1024:.0f} KiB at most."
    )


def torch_versions() -> str:
    """What the library does with each version of torch, from the tests that ran with it."""
    versions = load("torch-versions")["versions"].values()
    parts = list(dict.fromkeys(name for found in versions for name in found["parts"]))

    def outcome(part: dict[str, Any] | None) -> str:
        if part is None:
            return "-"
        failed = len(part["failed"])
        return f"{failed} of {failed + part['passed']} fail" if failed else f"all {part['passed']} pass"

    rows = []
    for found in versions:
        asks = "asks whether hooks are respected; the Session answers" if found["answered"] else "does not ask"
        cells = [outcome(found["parts"].get(name)) for name in parts]
        rows.append((found["torch"], *cells, asks if found["problem"] is None else found["problem"]))
    about = load("torch-versions")
    commit = about["machine"]["commit"][:12]
    line = f"Tests of each part that ran with each torch, {about['started'][:10]}, commit `{commit}`."
    return f"{line}\n\n" + table(("torch", *parts, "a selective checkpoint"), rows)


TABLES = {
    "torch-versions": torch_versions,
    "families": families,
    "session-window": session_window,
    "examples": examples,
    "demos": demos,
    "demo-sizes": demo_sizes,
    "demo-picture": demo_picture,
    "demo-pictures": demo_pictures,
    "zoo": zoo,
    "zoo-transformers": zoo_transformers,
}
