"""Tables of whole steps and of single nodes: peaks, times, what is alive at a peak, host time."""

from __future__ import annotations

from contextlib import suppress
from statistics import median
from typing import Any

from studies.published.results import (
    ENOUGH,
    MARK,
    case_title,
    kinds,
    load,
    machine_line,
    mib,
    newest,
    picture,
    started,
    summary,
    table,
    title,
)

_ORDER = ("vgg16", "alexnet", "resnet50", "gpt2_words", "resnet18", "gpt2")

_PICTURED = "vgg16-channels_last"
"""The case whose memory over a step README shows."""


def _sorted(cases: list[Any]) -> list[Any]:
    """Cases in the order of the tables: by network, channels last after NCHW."""

    def place(case: Any) -> tuple[int, bool]:
        network = case["network"]
        return (_ORDER.index(network) if network in _ORDER else len(_ORDER), case["channels_last"])

    return sorted(cases, key=lambda found: place(found["case"]))


def _peaks() -> list[Any]:
    return _sorted([found["case"] for found in load("peak-cpu")["cases"] if found["case"]["status"] == "measured"])


def _candidates(case: Any) -> dict[str, Any]:
    return {candidate["name"]: candidate for candidate in case["candidates"]}


_TIMED = ("steps-cpu", "bench-cpu", "peak-cpu")
"""Kinds of files that have times of whole steps."""


def _steps(kind: str) -> list[Any]:
    """The cases of a file with their candidates."""
    results = load(kind)
    found = results["steps"] if "steps" in results else [live["case"] for live in results["cases"]]
    return [step for step in found if step["status"] == "measured"]


def _timed(name: str, policy: str) -> tuple[Any, Any, str] | None:
    """The time of a policy over plain's, plain's own seconds, and the kind of the file.

    It is that of the newest file with enough rounds, or else of the newest file.
    """
    found = []
    for kind in _TIMED:
        for step in _steps(kind):
            by_name = _candidates(step)
            if step["case"]["name"] == name and policy in by_name:
                times = by_name[policy]["times_plain"]
                order = (times["count"] >= ENOUGH, times["count"] > 1, started(load(kind)))
                found.append((order, (times, by_name["plain"]["seconds"], kind)))
    return max(found, key=lambda item: item[0])[1] if found else None


def _time_cell(name: str, policy: str, *, bold: bool = False) -> str:
    timed = _timed(name, policy)
    if timed is None:
        return "-"
    times = timed[0]
    few = f" {MARK}" if times["count"] < ENOUGH else ""
    return (f"**{times['median']:.2f}x**" if bold else f"{times['median']:.2f}x") + few


def headline() -> str:
    """README's table: memory and time of each network, plain, under ``lossless`` and with checkpoints."""
    rows = []
    for case in _peaks():
        by_name = _candidates(case)
        plain, ours = by_name["plain"], by_name["lossless"]
        rows.append(
            (
                case_title(case["case"]),
                mib(plain["peak_nbytes"]),
                f"**{mib(ours['peak_nbytes'])}** ({plain['peak_nbytes'] / ours['peak_nbytes']:.1f}x smaller)",
                mib(by_name["checkpoint"]["peak_nbytes"]),
                mib(by_name["lossless+checkpoint"]["peak_nbytes"]),
                _time_cell(case["case"]["name"], "lossless", bold=True),
                _time_cell(case["case"]["name"], "checkpoint"),
            )
        )
    header = ("network", "peak, plain", "`lossless`", "`checkpoint`", "both", "step, `lossless`", "step, `checkpoint`")
    return f"Peak in MiB. {machine_line('peak-cpu')}\n\n{table(header, rows)}"


def image() -> str:
    """README's picture, with its caption: the frontier of a network, or memory over a step where there is none yet."""
    found = next(((kind, each) for kind, each in _frontiers() if each["case"]["name"] == _CHARTED), None)
    if found is None:
        return _memory_over_a_step()
    kind, network = found
    rows = {row["candidate"]: row for row in network["rows"]}
    least = min((row for row in network["rows"] if row["family"] == "ours"), key=lambda row: row["peak_nbytes"])
    caption = (
        f"{case_title(network['case'])}: {mib(rows['plain']['peak_nbytes'])} MiB in plain PyTorch, down to "
        f"{mib(least['peak_nbytes'])} MiB with a plan, in {summary(least['times_plain'])} times the time"
    )
    return f"![Peak memory against the time of a step. {caption}](results:{picture(kind, _CHARTED).name})"


def _memory_over_a_step() -> str:
    path = picture("peak-cpu", _PICTURED)
    case = next(found for found in _peaks() if found["case"]["name"] == _PICTURED)
    by_name = _candidates(case)
    plain, ours = by_name["plain"]["peak_nbytes"], by_name["lossless"]["peak_nbytes"]
    caption = f"{case_title(case['case'])}: {mib(plain)} MiB above parameters and gradients, {mib(ours)} with lossless"
    return f"![Memory during a training step. {caption}](results:{path.name})"


def peaks() -> str:
    """The peak of every policy, counted and resident."""
    rows = []
    for case in _peaks():
        by_name = _candidates(case)
        plain = by_name["plain"]["peak_nbytes"]
        for name, candidate in by_name.items():
            resident = candidate["resident"]
            rows.append(
                (
                    case_title(case["case"]) if name == "plain" else "",
                    name,
                    "yes" if candidate["gate"]["equal"] else "no",
                    mib(candidate["stash_nbytes"]),
                    mib(candidate["peak_nbytes"]),
                    f"{plain / candidate['peak_nbytes']:.2f}",
                    mib(resident["growth_nbytes"]) if resident else "-",
                )
            )
    header = ("network", "", "bits equal", "stash", "counted peak", "plain / this", "resident")
    return f"MiB. {machine_line('peak-cpu')}\n\n{table(header, rows)}"


def times() -> str:
    """The time of a step over plain's, with its quartiles, rounds and file."""
    names = {step["case"]["name"]: step["case"] for kind in _TIMED for step in _steps(kind)}
    rows, used = [], []
    for found in _sorted([{"case": case} for case in names.values()]):
        case = found["case"]
        for policy in ("lossless", "checkpoint"):
            timed = _timed(case["name"], policy)
            if timed is None:
                continue
            measured, plain, kind = timed
            again = _timed(case["name"], "plain again")
            spread = f"{plain['q1'] / plain['median']:.2f} to {plain['q3'] / plain['median']:.2f}"
            few = measured["count"] < ENOUGH
            rows.append(
                (
                    case_title(case) if policy == "lossless" else "",
                    policy,
                    summary(measured),
                    str(measured["count"]),
                    summary(again[0]) if again else "-" if few else spread,
                    kind,
                )
            )
            used.append(kind)
    header = ("network", "", "time of a step over plain's (quartiles)", "rounds", "noise", "file")
    lines = [f"* {kind}: {machine_line(kind)}" for kind in _TIMED if kind in used]
    noise = "*Noise*: plain measured again over plain, or, without that, the quartiles of plain's own rounds."
    return "\n".join([*lines, "", noise, "", table(header, rows)])


def alive() -> str:
    """What is alive at the peak, by role, and the three largest."""
    rows = []
    for found in load("peak-cpu")["cases"]:
        for live in found["live"]:
            roles: dict[str, int] = {}
            for row in live["rows"]:
                roles[row["role"]] = roles.get(row["role"], 0) + row["nbytes"]
            least = 0.01 * live["peak_nbytes"]
            by_role = sorted(((n, role) for role, n in roles.items() if n > least), reverse=True)
            rows.append(
                (
                    case_title(found["case"]["case"]) if live["policy"] == "plain" else "",
                    live["policy"],
                    mib(live["peak_nbytes"]),
                    ", ".join(f"{role} {mib(nbytes)}" for nbytes, role in by_role),
                    "; ".join(
                        f"{row['count']} x {row['name']} ({row['role']}) {mib(row['nbytes'])}"
                        for row in live["rows"][:3]
                        if row["nbytes"] > least
                    ),
                )
            )
    return f"MiB. {machine_line('peak-cpu')}\n\n" + table(("network", "", "all", "by role", "largest"), rows)


def nodes() -> str:
    """Single nodes of the backward pass."""
    results = load("nodes-cpu")
    rows = [
        (
            row["case"],
            f"{1e3 * row['plain']['median']:.1f}",
            f"{1e3 * row['ours']['median']:.1f}",
            summary(row["times_plain"]),
            str(row["times_plain"]["count"]),
        )
        for row in results["rows"]
    ]
    header = ("node of", "plain, ms", "ours, ms", "ours over plain (quartiles)", "rounds")
    return f"{machine_line('nodes-cpu')}\n\n{table(header, rows)}"


_HOST = (
    "plain again",
    "identity hooks",
    "function mode",
    "node creation hook",
    "save_on_cpu",
    "keep",
    "lossless_stored",
    "lossless",
    "lossless from 16 KiB on",
)


def host_time(kind: str = "hostcost-cpu") -> str:
    """Time of a Session's own work per saved tensor, in networks whose tensors are small."""
    by_case: dict[str, dict[str, Any]] = {}
    for row in load(kind)["rows"]:
        if not row["case"].startswith(_GROWING):
            by_case.setdefault(row["case"], {})[row["candidate"]] = row
    rows = []
    for case, found in by_case.items():
        known = [name for name in _HOST if name in found]
        rows += [
            (
                case if name == known[0] else "",
                name,
                summary(found[name]["times_plain"]),
                summary(found[name]["microseconds"], digits=0),
                str(found[name]["saved"]),
            )
            for name in known
        ]
    header = ("network", "", "time of a step over plain's (quartiles)", "µs more per tensor", "tensors saved")
    return f"{machine_line(kind)} `plain again` is the noise.\n\n{table(header, rows)}"


_GROWING = ("held", "relus")
"""Cases with more and more saved tensors."""


def host_time_growth() -> str:
    """Time per saved tensor in steps that save more and more of them."""
    by_case: dict[str, dict[str, Any]] = {}
    for row in load("hostcost-cpu")["rows"]:
        if row["case"].startswith(_GROWING):
            by_case.setdefault(row["case"], {})[row["candidate"]] = row
    names = ("plain again", "identity hooks", "keep", "lossless", "lossless from 16 KiB on")
    rows = [
        (
            case.split()[0],
            f"{found['keep']['saved']:,}",
            *(summary(found[name]["microseconds"], digits=1) for name in names),
        )
        for case, found in by_case.items()
    ]
    return f"{machine_line('hostcost-cpu')}\n\n{table(('results', 'tensors saved', *names), rows)}"


def _host_time_with_nodes() -> str:
    return host_time("hostcost-nodes-cpu")


_STEPTIME = "steptime-cpu"

_OVERHEAD = {
    "lossless": "`lossless`",
    "lossless, new Session": "`lossless`, a new Session in each step",
    "keep": "`keep`",
    "identity hooks": "identity hooks",
    "plain again": "plain again (noise)",
}
"""The columns of the table of whole steps: candidates, and their headings."""


def step_overhead() -> str:
    """Time of a Session in whole steps of networks of their published sizes; a notice until it has been measured."""
    if _STEPTIME not in kinds():
        return "Not measured yet. The command is `backstash bench steptime`."
    rows = []
    for network in load(_STEPTIME)["networks"]:
        if network["status"] != "measured":
            rows.append((case_title(network["case"]), network["status"], *[""] * 7))
            continue
        found = {row["candidate"]: row for row in network["rows"]}
        lossless = found["lossless"]
        few = f" {MARK}" if lossless["times_plain"]["count"] < ENOUGH else ""
        rows.append(
            (
                case_title(network["case"]),
                *(summary(found[name]["times_plain"]) for name in _OVERHEAD),
                f"{lossless['first_seconds'] / found['plain']['seconds']['median']:.1f}{few}",
                str(network["saved"]),
                f"{lossless['ratio']:.2f}",
            )
        )
    header = ("network", *_OVERHEAD.values(), "first step", "tensors saved", "saved / stash")
    path = newest(_STEPTIME)
    return f"[{path.name}](results:{path.name}). {machine_line(_STEPTIME)}\n\n{table(header, rows)}"


def ground() -> str:
    """Facts about the machine that decisions rest on."""
    rows = [
        (
            name,
            f"{1e3 * found['median']:.1f}",
            f"{1e3 * found['q1']:.1f} to {1e3 * found['q3']:.1f}",
            str(found["count"]),
        )
        for name, found in load("ground-cpu")["rows"].items()
    ]
    header = ("what", "ms", "quartiles", "rounds")
    return f"{machine_line('ground-cpu')}\n\n{table(header, rows)}"


_PLANNER = "planner-cpu"


def planner() -> str:
    """What greedy and exact plans add to a step, by budget; a notice until it has been measured."""
    if _PLANNER not in kinds():
        return "Not measured yet. The command is `python -m bench.planner`."
    found = load(_PLANNER)
    shares = [f"{budget['share']:g}" for budget in found["networks"][0]["budgets"]]
    rows = []
    for network in found["networks"]:
        cells = []
        for budget in network["budgets"]:
            best = "?" if budget["exact"] is None else f"{budget['exact'] - 1:.1%}"
            cells.append(f"{budget['greedy'] - 1:.1%} / {best}")
        cells += [""] * (len(shares) - len(cells))
        seconds = f"{network['search_seconds']:.1f} {MARK}"
        rows.append((network["name"], f"{network['values']:,}", seconds, f"{network['lowest']:.3f}", *cells))
    header = ("network", "values", "search, s", "least peak / plain's", *shares)
    path = newest(_PLANNER)
    about = (
        "The columns on the right are budgets, from 0 (the least peak of the frontier) to 1 (the plain peak): time "
        "that the plan adds to a step, greedy / exact. `?`: the exact solver did not end in two minutes."
    )
    return f"[{path.name}](results:{path.name}). {machine_line(_PLANNER)} {about}\n\n{table(header, rows)}"


_ALLOCATOR = "allocator-cpu"


def allocators() -> str:
    """Counted and resident peaks of whole processes under each allocator, as far as that has been measured."""
    rows = []
    for case, found in load(_ALLOCATOR)["cases"].items():
        first = f"{title(case)}, batch {load(_ALLOCATOR)['batch']}"
        settings = list(dict.fromkeys(row["setting"] for row in found))
        for candidate in dict.fromkeys(row["candidate"] for row in found):
            own = {row["setting"]: row for row in found if row["candidate"] == candidate}
            held = [mib(median(own[setting]["resident_nbytes"])) for setting in settings]
            counted = mib(median(own[settings[0]]["peak_nbytes"]))
            rows.append((first, candidate, counted, *held))
            first = ""
    names = ["glibc" if setting == "default" else setting for setting in settings]
    header = ("network", "candidate", "counted peak, MiB", *(f"process, {name}, MiB" for name in names))
    return f"{machine_line(_ALLOCATOR)}\n\n{table(header, rows)}"


_FRONTIER = "frontier-cpu"
_CHARTED = "resnet50"


def _frontiers() -> list[tuple[str, Any]]:
    """The networks whose frontiers were measured, by the kinds of their files: a file of its own comes first."""
    found: dict[str, tuple[str, Any]] = {}
    for kind in sorted((each for each in kinds() if each.startswith("frontier-")), key=lambda kind: kind == _FRONTIER):
        for network in load(kind)["networks"]:
            found.setdefault(network["case"]["name"], (kind, network))
    return list(found.values())


def frontier() -> str:
    """Peaks and times of plans beside checkpoints, with charts; a notice until it has been measured."""
    found = _frontiers()
    if not found:
        return "Not measured yet. The command is `python -m studies.frontier`."
    parts = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        networks = [network for own, network in found if own == kind]
        if len(networks) == 1:
            parts.append(f"{case_title(networks[0]['case'])}: {machine_line(kind)}")
            continue
        commits = [f"{case_title(each['case'])} at `{each['commit'][:12]}`" for each in networks if each.get("commit")]
        parts += [machine_line(kind), *([f"By network: {'; '.join(commits)}."] if commits else [])]
    for kind, network in found:
        with suppress(FileNotFoundError):
            path = picture(kind, network["case"]["name"])
            parts.append(f"![Peak against time: {case_title(network['case'])}](results:{path.name})")
    rows = [
        (
            case_title(network["case"]) if row["candidate"] == "plain" else "",
            row["candidate"],
            "" if row["budget_nbytes"] is None else mib(row["budget_nbytes"]),
            "" if row["predicted_nbytes"] is None else mib(row["predicted_nbytes"]),
            mib(row["peak_nbytes"]),
            mib(row["resident_nbytes"]) if row.get("resident_nbytes") else "-",
            summary(row["times_plain"]),
            "" if row["predicted_times_plain"] is None else f"{row['predicted_times_plain']:.2f}",
        )
        for _, network in found
        for row in network["rows"]
    ]
    header = ("network", "how", "budget, MiB", "predicted", "peak", "resident", "step, times plain's", "predicted")
    return "\n\n".join([*parts, table(header, rows)])


_PLANS = "plans-cpu"


def plans() -> str:
    """Plans of programs that the planner was not built on; a notice until they were judged."""
    if _PLANS not in kinds():
        return "Not measured yet. The command is `python -m studies.heldout_plans`."
    rows, pairs, kept, worst = [], 0, 0, 0.0
    for program in load(_PLANS)["programs"]:
        for number, row in enumerate(program["rows"]):
            name = program["program"] if not number else ""
            cells = [name, row["budget"], mib(row["budget_nbytes"])]
            if row["predicted_nbytes"] is None:
                rows.append((*cells, *[""] * 6))
                continue
            off = (row["predicted_nbytes"] - row["reached_nbytes"]) / row["reached_nbytes"]
            pairs, worst = pairs + 1, max(worst, abs(off))
            kept += row["reached_nbytes"] <= row["budget_nbytes"]
            cells += [mib(row["predicted_nbytes"]), mib(row["reached_nbytes"]), f"{off:+.2%}"]
            times = "" if row["times_plain"] is None else summary(row["times_plain"])
            rows.append(
                (*cells, times, f"{row['predicted_times_plain']:.2f}", "no" if row["differing"] else "yes"),
            )
    header = (
        "program",
        "budget",
        "MiB",
        "predicted",
        "reached",
        "off",
        "step, times plain's",
        "predicted",
        "bits equal",
    )
    about = f"{pairs} plans, of which {kept} kept their budgets; predicted peaks are off by {worst:.2%} at most."
    return f"{about} {machine_line(_PLANS)}\n\n{table(header, rows)}"


def shapes() -> str:
    """First and later steps of random lengths under plans of shapes that were never run."""
    rows = []
    for kind in ("shapes-cpu", "shapes-images-cpu"):
        for row in load(kind)["programs"]:
            drawn, planned = row["lengths"]
            rooms = [" / ".join(f"{share:.0%}" for share in row[name]) for name in ("first_room", "room")]
            first, later = row["above"]
            slower = " / ".join(f"{times:.2f}" for times in row["slower"])
            counts = f"{planned} of {drawn}", f"{first}", f"{later}", f"{row['least']:.2f}"
            rows.append((row["name"], *counts, *rooms, slower, f"{row['milliseconds']:.0f}"))
    header = (
        "program",
        "planned",
        "first above",
        "later above",
        "least, first / later",
        "first below predicted",
        "later below predicted",
        "time / own",
        "ms to plan",
    )
    return f"{machine_line('shapes-cpu')}\n\n{table(header, rows)}"


_PLAN_TIMES = {"before": "plan-times-before-cpu", "after": "plan-times-cpu"}


def plan_times() -> str:
    """What plans of seven networks take to make and keep, before and after planning became fast."""
    lines: dict[tuple[str, float], dict[str, tuple[str, ...]]] = {}
    for when, kind in _PLAN_TIMES.items():
        for network in load(kind)["networks"]:
            plain, first = network["plain_seconds"]["median"], network["profiled"]
            for number, row in enumerate(network["budgets"]):
                made = row["made"]
                steps = made["steps"] + (0 if number else first["steps"])
                seconds = made["processor_seconds"] + (0.0 if number else first["processor_seconds"])
                budget = f"{row['share']:.0%}, {mib(row['nbytes'])} MiB"
                cells = [budget, when, f"{seconds:.1f}", str(steps), f"{seconds / plain:.0f}"]
                if row["predicted_nbytes"] is None:
                    cells += [f"none below {mib(row['smallest_nbytes'])}", "", ""]
                else:
                    cells += [mib(row["reached_nbytes"]), f"{row['predicted_times_plain']:.2f}"]
                    cells += [summary(row["times_plain"])]
                key = case_title(network["case"]), row["share"]
                lines.setdefault(key, {})[when] = tuple(cells)
    rows = [(named, *cells) for (named, _), found in lines.items() for cells in found.values()]
    header = ("network", "budget", "", "s", "steps run", "in plain steps", "reached, MiB", "predicted", "x plain's")
    about = (
        "Seconds of the processor for the profile and the plan together, on the first line of a network; on the second "
        "for one more plan. The machine did other work too. A budget is a share of what a plain step took in that run."
    )
    machines = (f"{when.capitalize()}: {machine_line(kind)}" for when, kind in _PLAN_TIMES.items())
    return f"{' '.join((about, *machines))}\n\n{table(header, rows)}"


def exact_codecs() -> str:
    """Exact codecs on what networks save: ratios by dtype, and the speed of the codec of exponents."""
    results = load("exact")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results["rows"]:
        found.setdefault((row["network"].partition(",")[0], row["dtype"]), {})[row["codec"]] = row
    rows = []
    for (network, dtype), by_codec in found.items():
        four = by_codec["exponents, 4"]
        speeds = [f"{four[way]['share_of_copy']['median']:.2f}" if four[way] else "-" for way in ("encode", "decode")]
        ratios = [f"{by_codec[name]['ratio']:.2f}" for name in ("zvc", "exponents, 4", "exponents, 3")]
        rows.append((network, dtype, *ratios, *speeds))
    head = ("network", "dtype", "zvc", "exponents, 4 bits", "exponents, 3 bits", "encode (4 bits)", "decode (4 bits)")
    return f"{machine_line('exact')}\n\n{table(head, rows)}"


def exact_ratios() -> str:
    """Exact codecs on what networks in bfloat16 save: ratios by dtype."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in load("exact-families")["rows"]:
        if row["setting"] == "bfloat16":
            found.setdefault((row["network"], row["dtype"]), {})[row["codec"]] = row
    rows = []
    names = ("zvc", "upcast", "upcast exponents", "exponents, 4", "exponents, 3", "zstd")
    for (network, dtype), by_codec in found.items():
        ratios = [f"{by_codec[name]['ratio']:.2f}" if name in by_codec else "-" for name in names]
        rows.append((network, dtype, *ratios))
    shown = ("zvc", "upcast", "upcast, exponents", "exponents, 4 bits", "exponents, 3 bits", "zstd, level 1")
    head = ("network", "dtype", *shown)
    return f"{machine_line('exact-families')}\n\n{table(head, rows)}"


def exact_stash() -> str:
    """Dense bytes of what networks save over what Sessions hold of it, without and with codes for dense values."""
    found: dict[str, dict[str, str]] = {}
    coded: dict[str, str] = {}
    for row in load("exact-stash")["stash"]:
        without, whole = (row["saved_nbytes"] / row[f"{name}_nbytes"] for name in ("lossless", "dense"))
        text = f"{without:.2f} -> {whole:.2f} (x {whole / without:.2f})"
        found.setdefault(row["network"], {})[row["setting"]] = text
        if row["setting"] == "bfloat16":
            coded[row["network"]] = f"{row['coded_nbytes'] / row['lossless_nbytes']:.0%}"
    settings = ("bfloat16", "autocast", "float32")
    rows = [(name, *(of.get(each, "-") for each in settings), coded[name]) for name, of in found.items()]
    head = ("network", *settings, "in codes already, bfloat16")
    return f"{machine_line('exact-stash')}\n\n{table(head, rows)}"


def exact_plans() -> str:
    """The lowest exact peaks of plans, without and with codes for dense values."""
    rows = []
    for row in load("exact-families")["plans"]:
        before, after = row["before_nbytes"], row["after_nbytes"]
        saves = f"{1 - after / before:.0%}"
        sizes = [f"{nbytes / 2**20:.2f}" for nbytes in (row["plain_nbytes"], before, after)]
        rows.append((row["network"], ", ".join(row["allow"]), *sizes, saves, f"{row['slower']:.3f}"))
    head = ("network, bfloat16", "allowed", "plain, MiB", "lowest without", "lowest with", "less", "largest time ratio")
    return f"{machine_line('exact-families')}\n\n{table(head, rows)}"


def exact_disk() -> str:
    """What is moved to a disk in a step, and how long steps take."""
    rows = []
    for row in load("exact-families")["disk"]:
        without, whole = row["nbytes"]["moved"], row["nbytes"]["moved, dense"]
        times = [f"{row['seconds'][way]['median']:.1f}" for way in ("plain", "plain again", "moved", "moved, dense")]
        rows.append((row["network"], mib(without), mib(whole), f"{1 - whole / without:.0%}", *times))
    head = (
        "bfloat16",
        "moved, MiB",
        "moved, `dense`",
        "less",
        "plain, s",
        "plain again",
        "moved, s",
        "moved, `dense`, s",
    )
    return f"{machine_line('exact-families')}\n\n{table(head, rows)}"


def verify() -> str:
    """The times and the peak of watched steps, beside those of the same steps that are not watched."""
    costs = {(cost["network"], cost["way"]): cost for cost in load("verify-cpu")["costs"]}
    rows = []
    for (network, way), cost in costs.items():
        if cost["values"]:
            base = costs[network, way.removesuffix(", watched")]
            times = [cost[of]["median"] / base[of]["median"] for of in ("seconds", "processor_seconds")]
            peak = cost["peak_nbytes"] / base["peak_nbytes"]
            rows.append(
                (
                    title(network),
                    way.removesuffix(", watched"),
                    *(f"{each:.2f}" for each in times),
                    f"{peak:.3f}",
                    f"{cost['values']}",
                )
            )
    text = table(("network", "step", "time", "processor's time", "counted peak", "values compared"), rows)
    rounds = min(cost["processor_seconds"]["count"] for cost in costs.values())
    head = f"Times those of the step that is not watched; medians of {rounds} rounds."
    return f"{head} {machine_line('verify-cpu')}\n\n{text}"


TABLES = {
    "verify": verify,
    "exact-codecs": exact_codecs,
    "exact-disk": exact_disk,
    "exact-plans": exact_plans,
    "exact-ratios": exact_ratios,
    "exact-stash": exact_stash,
    "allocators": allocators,
    "plans": plans,
    "plan-times": plan_times,
    "shapes": shapes,
    "frontier": frontier,
    "headline": headline,
    "picture": image,
    "peaks": peaks,
    "step-times": times,
    "alive-at-peak": alive,
    "nodes": nodes,
    "host-time": host_time,
    "host-time-growth": host_time_growth,
    "host-time-of-nodes": _host_time_with_nodes,
    "ground": ground,
    "step-overhead": step_overhead,
    "planner": planner,
}
