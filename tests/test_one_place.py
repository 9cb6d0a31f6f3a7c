"""What is done in one place alone: groups, collectives, names of a run's files, figures, parts of tensors, threads."""

from __future__ import annotations

import ast
import re

from test_floors import ROOT, SOURCES, called

from paceline.units import plural

GROUPS = {"paceline.run.process.groups", "paceline.run.process.world"}  # of a run
OWN_GROUPS = {"paceline.cluster.probe.rank", "paceline.cluster.probe.collectives"}  # a probe's processes have no run
MAKE_GROUPS = {"new_group", "new_subgroups", "init_process_group", "init_device_mesh", "split_group"}


def test_process_groups_are_made_in_one_place() -> None:
    """A group made elsewhere has torch's time-out of 30 minutes, and nobody who ends it: `World.groups` has both."""
    makers = {
        module
        for module, path in SOURCES.items()
        if any(name in (text := path.read_text(encoding="utf-8")) for name in MAKE_GROUPS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and called(node) in MAKE_GROUPS
    }
    assert makers == GROUPS | OWN_GROUPS


# Collectives of torch that are of all ranks where no group is given; those of points to points name it in their parts.
COLLECTIVES = {"all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list",
               "gather_object", "scatter_object_list", "barrier", "reduce_scatter_tensor",
               "all_to_all_single"}  # fmt: skip
ASK_ALL = GROUPS | OWN_GROUPS | {"paceline.cluster.probe.units", "paceline.cluster.probe.worker",
                                 "paceline.session.together"}  # fmt: skip # the last before a world


def test_all_ranks_are_asked_by_their_world_alone() -> None:
    """Whoever asks torch's default group counts on there being one, which the next world replaces."""
    asked = {
        module
        for module, path in SOURCES.items()
        if any(f"dist.{name}(" in (text := path.read_text(encoding="utf-8")) for name in COLLECTIVES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and called(node) in COLLECTIVES and ast.unparse(node.func).startswith("dist.")
        if "group" not in {word.arg for word in node.keywords}
    }
    assert asked <= ASK_ALL


def test_what_a_runs_directory_holds_is_named_in_one_place() -> None:
    """And so are the variables by which a supervisor tells a rank what the rank is."""
    spelled: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        text = path.read_text("utf-8")
        own = re.findall(r"/ (\"(?:journal|checkpoints)\")|(\"(?:\*\*?/)journal\")|(\"PACELINE_[A-Z_]+\")", text)
        for name in {"".join(each) for each in own}:
            spelled.setdefault(name, []).append(module)
    temporary = {"paceline.verify.compare.copies"}  # a proof's folder is no run's
    assert len(spelled) > 5
    assert {name: found for name, found in spelled.items() if len(set(found) - temporary) > 1} == {}
    assert not {name for name in spelled if "PACELINE_" not in name} - {'"checkpoints"'}


def test_one_file_writes_svg() -> None:
    """Figures of plans, of live pages and of reports are drawn by the same pieces."""
    assert [module for module, path in SOURCES.items() if "<svg" in path.read_text("utf-8")] == ["paceline.svg"]


def test_what_a_rank_holds_of_a_tensor_is_asked_in_one_place() -> None:
    """The choice between a plain tensor and one in shards stands in `task/models/held.py`, and is not spelled again."""
    again = {
        module
        for module, path in SOURCES.items()
        if re.search(
            r"\b(\w+)\.(full_tensor|to_local)\(\) if (?:isinstance\(\1, DTensor\)|is_spread\(\1\)) else \1(?![\w.])",
            path.read_text("utf-8"),
        )
    }
    assert again == {"paceline.task.models.held"}


def test_no_thread_holds_a_process_that_is_to_end() -> None:
    """The interpreter waits for threads that are no daemons, and for those of the standard library's pools, whatever
    they do: one that reads from a silent storage holds a process for minutes after Ctrl-C."""
    waited = {"run/trace/tracer.py": 1}  # writes what was traced, and ends
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "Thread" not in text and "Timer" not in text:
            continue
        for call in (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)):
            what = called(call)
            is_daemon = any(word.arg == "daemon" and ast.unparse(word.value) == "True" for word in call.keywords)
            is_daemon |= what == "Timer" and ".daemon = True" in text  # which its constructor does not take
            if what in ("Thread", "Timer", "ThreadPoolExecutor") and not is_daemon:
                name = str(path.relative_to(ROOT))
                found[name] = found.get(name, 0) + 1
    assert found == waited


def test_what_torchs_wrappers_put_into_names_is_known_in_one_place() -> None:
    """Five files took them out of names, each by a list of its own."""
    again = [module for module, path in SOURCES.items() if '"_checkpoint_wrapped_module' in path.read_text("utf-8")]
    assert again == ["paceline.task.plain_names"]


def test_a_count_has_its_own_plural() -> None:
    """ "1 step(s)" is for programs: `units.plural` says "1 step" and "2 processes"."""
    both = re.compile(r"\w\((?:e?s)\)")
    assert both.search("3 process(es)") and both.search("1 step(s) more") and plural(2, "process") == "2 processes"
    assert [module for module, path in SOURCES.items() if both.search(path.read_text("utf-8"))] == []
