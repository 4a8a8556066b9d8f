"""Plugins: found by metadata, tried apart, used like any other - and none harms another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplat.config.entry_points import GROUPS, declared, parse
from tests.unit.plugin_sites import CATALOG, LAST, PREFERENCES, ask, install, install_backend, run

LAYER = "attnplat.MhaConfig(head_size=64, num_heads=4, num_kv_heads=2)"
TELL = """
    import attnplat
    from attnplat.platforms import plugins_here
    found = {p.distribution: p.to_dict() for p in plugins_here()}
    platform = attnplat.platform_for("cpu:avx2")
    names = [b.name for b in platform.select(LAYER).accepted]
    print(json.dumps({"plugins": found, "names": names}))
""".replace("LAYER", LAYER)

OWN = ["CPU_ATTN", "TORCH_SDPA", "REFERENCE"]
"""What the CPU platform accepts for that layer without plugins."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def problem_of(told: dict[str, Any], distribution: str) -> dict[str, str]:
    plugin = told["plugins"][distribution]
    assert plugin["used"] is False
    problem: dict[str, str] = plugin["problem"]
    return problem


# --- metadata --------------------------------------------------------------------------------


def test_entry_points_are_read_without_any_import(site: Path) -> None:
    text = """
    [console_scripts]
    tool = my_tool:main
    [attnplat.backends]
    # a comment
    my-attn = my_package
    OTHER_ATTN=my_package.inner
    [attnplat.platforms]
    TPU = tpu_package
    """
    assert parse(text) == [
        ("attnplat.backends", "MY_ATTN", "my_package"),
        ("attnplat.backends", "OTHER_ATTN", "my_package.inner"),
        ("attnplat.platforms", "tpu", "tpu_package"),
    ]
    install(site, "Some_Dist.ribution", text, {})
    found = declared([str(site)])
    assert {e.distribution for e in found.entry_points} == {"some-dist-ribution"}
    assert found.names("attnplat.platforms") == ("tpu",)


def test_a_folder_is_read_again_when_something_was_installed_into_it(site: Path) -> None:
    assert declared([str(site)]).entry_points == ()
    install_backend(site, "late", "LATE_ATTN")
    assert declared([str(site)]).names("attnplat.backends") == ("LATE_ATTN",)


def test_of_a_distribution_that_is_installed_twice_the_first_counts(tmp_path: Path) -> None:
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        install_backend(tmp_path / folder, "twice", "TWICE_ATTN", version=version)
    (found,) = declared([str(tmp_path / "first"), str(tmp_path / "second")]).entry_points
    assert found.version == "2.0"


@given(st.text(alphabet="[]attnpl.bckeds=:# \n\t\x00é", max_size=200))
def test_no_text_of_entry_points_is_an_error(text: str) -> None:
    for group, name, package in parse("[attnplat.backends]\n" + text):
        assert group in GROUPS and isinstance(name, str) and isinstance(package, str)


# --- what a plugin adds ----------------------------------------------------------------------


def test_importing_attnplat_and_naming_its_backend_imports_no_plugin(site: Path) -> None:
    install_backend(site, "loud", "LOUD_ATTN", contract="raise SystemExit('imported')\n")
    told = ask(
        site,
        """
        import sys, attnplat, attnplat.cli.main
        from attnplat import AttentionConfig, BackendName
        spellings = ("LOUD_ATTN", "loud_attn", "Loud-Attn")
        names = [AttentionConfig(backend=name).backend for name in spellings]
        known = BackendName.LOUD_ATTN is names[0] and BackendName.LOUD_ATTN in list(BackendName)
        try:
            AttentionConfig(backend="LOUD_ATN")
        except attnplat.UnknownNameError as error:
            print(json.dumps([names, known, error.closest, "loud" in sys.modules]))
        """,
    )
    assert told == [["LOUD_ATTN"] * 3, True, "LOUD_ATTN", False]


def test_backends_stand_where_their_plugins_say(site: Path) -> None:
    install_backend(site, "a-first", "A_FIRST_ATTN")
    install_backend(site, "b-first", "B_FIRST_ATTN")
    install_backend(site, "c-last", "C_LAST_ATTN", order=LAST)
    told = ask(site, TELL)
    assert all(plugin["used"] for plugin in told["plugins"].values()), told
    firsts = ["A_FIRST_ATTN", "B_FIRST_ATTN"]
    assert told["names"] == [*firsts, *OWN[:-1], "C_LAST_ATTN", "REFERENCE"]


def test_a_row_counts_where_its_condition_holds_and_says_why(site: Path) -> None:
    row = PREFERENCES.replace(
        "because=", "when=lambda config, world: config.head_size > 100, because="
    )
    install_backend(site, "large", "LARGE_ATTN", preferences=row)
    told = ask(
        site,
        """
        import attnplat
        platform = attnplat.platform_for("cpu:avx2")
        small, large = (
            platform.select(attnplat.MhaConfig(head_size=n, num_heads=4, num_kv_heads=2))
            for n in (64, 128)
        )
        print(json.dumps([small.chosen.name, large.chosen.name, large.explain()]))
        """,
    )
    assert told[:2] == ["CPU_ATTN", "LARGE_ATTN"]
    assert "because the plugin large 1.0 has LARGE_ATTN: it is made up; then" in told[2]


def test_a_backend_joins_the_platforms_that_it_is_for(site: Path) -> None:
    catalog = CATALOG.replace("summary", 'on={{"platform": OneOf("rocm")}}, summary').replace(
        "from attnplat.config", "from attnplat.backends.limits import OneOf\nfrom attnplat.config"
    )
    install_backend(site, "for-amd", "AMD_ATTN", catalog=catalog)
    told = ask(
        site,
        f"""
        import attnplat
        wishes, layer = attnplat.AttentionConfig(backend="AMD_ATTN"), {LAYER}
        cpu, rocm = (attnplat.platform_for(d).select(layer, wishes) for d in ("cpu:avx2", "gfx950"))
        print(json.dumps([cpu.ok, cpu.explain(), rocm.ok]))
        """,
    )
    assert told[0] is False and told[2] is True
    assert "AMD_ATTN: it belongs to the platform rocm; this device is cpu:avx2" in told[1]


def test_what_it_requires_is_looked_for_whether_attnplat_knows_it_or_not(site: Path) -> None:
    catalog = CATALOG.replace("summary", 'requires=(Package("some-kernels"),), summary').replace(
        "import Backend", "import Backend, Package"
    )
    install_backend(site, "needy", "NEEDY_ATTN", catalog=catalog)
    code = f"""
        import attnplat
        wishes = attnplat.AttentionConfig(backend="NEEDY_ATTN")
        platform = attnplat.platform_for("cpu:avx2", assume="installed")
        print(json.dumps(platform.select({LAYER}, wishes).explain()))
    """
    assert "needs the package some-kernels, which is not installed" in ask(site, code)
    install(site, "some-kernels", "", {})
    assert "-> NEEDY_ATTN" in ask(site, code)


def test_the_rules_of_another_engine_know_no_plugins(site: Path) -> None:
    install_backend(site, "plain", "PLAIN_ATTN")
    names = ask(
        site,
        f"""
        import attnplat
        from attnplat.platforms.rules import under
        platform = under("vllm-0.33", attnplat.platform_for("cpu:avx2"))
        print(json.dumps([b.name for b in platform.select({LAYER}).accepted]))
        """,
    )
    assert "PLAIN_ATTN" not in names and "CPU_ATTN" in names


# --- what can be wrong with one --------------------------------------------------------------

RAISES = {
    "ImportError": "raise ImportError('libfoo.so: undefined symbol')",
    "ModuleNotFoundError": "import module_that_nobody_has",
    "SystemExit": "raise SystemExit(0)",
    "KeyError": "{}['x']",
    "BaseException": "raise BaseException('anything')",
    "FileNotFoundError": "open('/nowhere/at/all')",
    "SyntaxError": "def f(:",
}


def test_a_plugin_whose_import_raises_is_set_aside_with_the_reason(site: Path) -> None:
    install_backend(site, "sound", "SOUND_ATTN")
    for name, line in RAISES.items():
        install_backend(site, f"bad-{name}".lower(), f"{name.upper()}_ATTN", contract=line + "\n")
    told = ask(site, TELL)
    assert told["names"] == ["SOUND_ATTN", *OWN]
    for name in RAISES:
        problem = problem_of(told, f"bad-{name}".lower())
        assert problem["kind"] == "import"
        assert name in problem["text"] and f"bad-{name}".lower() in problem["fix"], problem
    assert "module_that_nobody_has" in problem_of(told, "bad-modulenotfounderror")["fix"]


ENDS = {
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(0)",
    "prints": "print('{}'); import os; os._exit(3)",
}


def test_a_plugin_whose_import_ends_python_is_set_aside_and_doctor_lives(site: Path) -> None:
    install_backend(site, "sound", "SOUND_ATTN")
    for name, line in ENDS.items():
        install_backend(site, name, f"{name.upper()}_ATTN", contract=line + "\n")
    told = ask(
        site,
        """
        from attnplat.cli.main import main
        import contextlib, io
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(["doctor", "--json"])
        print(json.dumps([code, json.loads(out.getvalue())]))
        """,
    )
    assert told[0] == 0
    problems = {p["distribution"]: p["problem"] for p in told[1]["plugins"]}
    assert problems.pop("sound") is None
    assert {p["kind"] for p in problems.values()} == {"ended"}
    for name, problem in problems.items():
        (fix,) = [f["fix"] for f in told[1]["findings"] if problem["text"] in f["text"]]
        assert fix == f"update or uninstall {name}"


CONTRACTS = {
    "older": ("ATTNPLAT_CONTRACT = 0\n", "pip install --upgrade older"),
    "newer": ("ATTNPLAT_CONTRACT = 99\n", "pip install --upgrade attnplat"),
    "silent": ("", "update silent"),
    "wrong": ("ATTNPLAT_CONTRACT = '1'\n", "update wrong"),
}


def test_a_plugin_of_another_contract_is_set_aside_before_more_of_it_is_imported(
    site: Path,
) -> None:
    install_backend(site, "sound", "SOUND_ATTN")
    for name, (contract, _) in CONTRACTS.items():
        bad = "raise RuntimeError('more of it was imported')\n"
        install_backend(site, name, f"{name.upper()}_ATTN", contract=contract, catalog=bad)
    told = ask(site, TELL)
    assert told["names"] == ["SOUND_ATTN", *OWN]
    for name, (_, fix) in CONTRACTS.items():
        problem = problem_of(told, name)
        assert problem["kind"] == "contract" and fix in problem["fix"], problem


SHAPES = {
    "no-tuple": dict(catalog="CATALOG = 5\n"),
    "no-backend": dict(catalog="CATALOG = ('a backend',)\n"),
    "no-catalog": dict(catalog="\n"),
    "undeclared": dict(declared="SOMETHING_ELSE"),
    "no-rest": dict(order='"{name}"'),
    "not-its-own": dict(order='"TORCH_SDPA", REST, "{name}"'),
    "in-no-row": dict(preferences="PREFERENCES = ()\n"),
    "no-such-field": dict(
        catalog=CATALOG.replace("summary", 'takes={{"head_sise": OneOf(1)}}, summary').replace(
            "from attnplat.config",
            "from attnplat.backends.limits import OneOf\nfrom attnplat.config",
        )
    ),
    "no-such-feature": dict(
        catalog=CATALOG.replace(
            "summary", 'requires=(Package("x", feature="made_up"),), summary'
        ).replace("import Backend", "import Backend, Package")
    ),
}


def test_a_plugin_of_another_shape_is_set_aside_with_what_is_wrong(site: Path) -> None:
    install_backend(site, "sound", "SOUND_ATTN")
    for number, (name, change) in enumerate(SHAPES.items()):
        install_backend(site, name, f"SHAPE_{number}_ATTN", **change)
    told = ask(site, TELL)
    assert told["names"] == ["SOUND_ATTN", *OWN]
    for name in SHAPES:
        problem = problem_of(told, name)
        assert problem["kind"] in ("shape", "import") and name in problem["fix"], problem
    assert "'head_sise'" in str(problem_of(told, "no-such-field")) or "head_sise" in str(told)


def test_of_two_that_declare_a_name_the_second_is_set_aside_and_told(site: Path) -> None:
    install_backend(site, "one", "SHARED_ATTN")
    install_backend(site, "two", "SHARED_ATTN")
    install_backend(site, "three", "FLASH_ATTN")
    told = ask(site, TELL)
    assert told["names"] == ["SHARED_ATTN", *OWN]
    assert told["plugins"]["one"]["used"]
    twice, ours = problem_of(told, "two"), problem_of(told, "three")
    assert twice["kind"] == ours["kind"] == "duplicate"
    assert "SHARED_ATTN, which one 1.0 has" in twice["text"]
    assert twice["fix"] == "uninstall two or one"
    assert "FLASH_ATTN, which attnplat has" in ours["text"]


def test_a_name_or_package_that_cannot_be_one_is_set_aside(site: Path) -> None:
    for name, entry in {
        "odd-name": "2ND_ATTN = odd",
        "odd-package": "GOOD_ATTN = odd:attribute",
        "no-package": "NONE_ATTN =",
    }.items():
        install(site, name, f"[attnplat.backends]\n{entry}\n", {})
    told = ask(site, TELL)
    assert told["names"] == OWN
    assert {p["problem"]["kind"] for p in told["plugins"].values()} == {"form"}


def test_a_backend_of_a_plugin_that_is_set_aside_is_refused_with_its_reason(site: Path) -> None:
    install_backend(site, "broken", "BROKEN_ATTN", contract="raise ImportError('no libfoo')\n")
    told = ask(
        site,
        f"""
        import attnplat
        from attnplat.cli.check import backends_here
        selection = attnplat.platform_for("cpu:avx2").select(
            {LAYER}, attnplat.AttentionConfig(backend="broken_attn"))
        print(json.dumps([selection.ok, selection.failure(), backends_here("cpu")]))
        """,
    )
    assert told[0] is False
    assert "ImportError: no libfoo; update or uninstall broken" in told[1]
    assert "BROKEN_ATTN" not in told[2] and "TORCH_SDPA" in told[2], "`attnplat check` goes on"


def test_declarations_that_raise_when_asked_refuse_and_harm_nobody(site: Path) -> None:
    rule = CATALOG.replace(
        "summary", 'forbids=(Rule("r", lambda c, w: c.nothing_of_the_sort, "x"),), summary'
    ).replace("import Backend", "import Backend, Rule")
    row = PREFERENCES.replace("because=", "when=lambda config, world: 1 / 0, because=")
    install_backend(site, "bad-rule", "RULE_ATTN", catalog=rule)
    install_backend(site, "bad-row", "ROW_ATTN", preferences=row)
    told = ask(
        site,
        f"""
        import attnplat
        platform = attnplat.platform_for("cpu:avx2")
        selection = platform.select({LAYER})
        print(json.dumps([[b.name for b in selection.accepted], selection.explain()]))
        """,
    )
    assert told[0] == OWN
    assert "RULE_ATTN: its declaration in the plugin bad-rule 1.0 failed with Attr" in told[1]


def test_a_plugin_that_does_not_answer_in_time_is_slow(site: Path) -> None:
    install_backend(site, "slow", "SLOW_ATTN", contract="import time; time.sleep(60)\n")
    told = ask(
        site,
        """
        from attnplat.platforms.plugin_trial import try_plugin
        print(json.dumps(try_plugin("slow", "slow 1.0", ["SLOW_ATTN"], [], limit_s=1.0)))
        """,
    )
    assert told[1:] == [
        "slow",
        "importing the plugin slow 1.0 takes longer than 1 s",
        "update or uninstall slow",
    ]


@pytest.mark.slow
def test_a_slow_plugin_is_set_aside_and_the_wait_is_not_repeated(site: Path) -> None:
    install_backend(site, "slow", "SLOW_ATTN", contract="import time; time.sleep(60)\n")
    install_backend(site, "sound", "SOUND_ATTN")
    code = """
        import time, attnplat.platforms.plugin_trial as trial, attnplat.platforms.plugins as plugins
        started = time.monotonic()
        found = {p.distribution: p.problem and p.problem.kind for p in plugins.installed_plugins()}
        print(json.dumps([found, time.monotonic() - started, trial.LIMIT_S]))
    """
    found, seconds, limit = ask(site, code)
    assert found == {"slow": "slow", "sound": None}
    assert limit <= seconds
    again, seconds, _ = ask(site, code)
    assert again == found and seconds < limit


def test_a_trial_is_remembered_until_a_file_of_the_plugin_changes(site: Path) -> None:
    install_backend(site, "counted", "COUNTED_ATTN")
    init = site / "counted" / "__init__.py"
    counter = site.with_name("imports")
    init.write_text(init.read_text() + f"open({str(counter)!r}, 'a').write('x')\n")

    def imports() -> int:
        assert ask(site, TELL)["plugins"]["counted"]["used"]
        return len(counter.read_text())

    assert imports() == 2, "once in the trial, once here"
    assert imports() == 3, "the trial is remembered"
    init.write_text(init.read_text() + "# changed\n")
    assert imports() == 5


def test_without_a_cache_folder_plugins_work_all_the_same(site: Path) -> None:
    install_backend(site, "sound", "SOUND_ATTN")
    told = ask(site, TELL, ATTNPLAT_CACHE_DIR="/proc/nowhere")
    assert told["names"] == ["SOUND_ATTN", *OWN]


# --- platforms -------------------------------------------------------------------------------

TOY = {
    "toy_plugin/__init__.py": "ATTNPLAT_CONTRACT = 1\n",
    "toy_plugin/detect.py": """
        from attnplat.errors import UnknownNameError
        from attnplat.platforms.detection import Detection
        from attnplat.platforms.device import DeviceInfo

        TORCH_TYPE = "cpu"

        def detect():
            return Detection((DeviceInfo(platform="toy", arch="t1", name="Toy One"),))

        def simulate(arch):
            if arch not in ("t1", "t2"):
                raise UnknownNameError("toy architecture", arch, ("t1", "t2"))
            return DeviceInfo(platform="toy", arch=arch, simulated=True)
        """,
    "toy_plugin/catalog.py": """
        from attnplat.backends.backend import Backend
        from attnplat.backends.limits import OneOf
        from attnplat.backends.portable.catalog import PORTABLE
        from attnplat.config.names import Operation

        TOY_ATTN = Backend(
            name="TOY_ATTN", summary="made up", serves={Operation.MHA},
            takes={"head_size": OneOf(64)}, loads="toy_plugin.impls:Impl",
        )
        CATALOG = (TOY_ATTN, *(b for b in PORTABLE if b.name in ("TORCH_SDPA", "REFERENCE")))
        """,
    "toy_plugin/preferences.py": """
        from attnplat.config.names import Operation
        from attnplat.platforms.selection import Preference

        PREFERENCES = (
            Preference(
                serves={Operation.MHA}, order=("TOY_ATTN", "TORCH_SDPA", "REFERENCE"),
                because="the toy's own kernel is the fastest on it",
            ),
        )
        """,
}
TOY_ENTRY = "[attnplat.platforms]\ntoy = toy_plugin\n[attnplat.backends]\nTOY_ATTN = toy_plugin\n"


def test_a_platform_of_a_plugin_is_found_simulated_explained_and_listed(site: Path) -> None:
    install(site, "toy-plugin", TOY_ENTRY, TOY)
    told = ask(
        site,
        """
        import attnplat
        from attnplat.cli.main import main
        here, there = attnplat.current_platform(), attnplat.platform_for("toy:t2")
        layer = attnplat.MhaConfig(head_size=64, num_heads=4, num_kv_heads=4)
        small, large = layer, layer.replace(head_size=80)
        elsewhere = attnplat.platform_for("cpu:avx2").select(
            small, attnplat.AttentionConfig(backend="toy_attn"))
        codes = [main(c) for c in (["backends", "--platform", "toy"], ["doctor"],
                                   ["explain", "--device", "toy:t1", "--head-size", "64"])]
        try:
            attnplat.platform_for("toy:t3")
        except attnplat.UnknownNameError as error:
            known = error.known
        print(json.dumps([
            here.name, here.torch_device, here.select(small).chosen.name,
            there.select(large).explain(), elsewhere.explain(), codes, known]))
        """,
    )
    name, torch_device, chosen, explained, elsewhere, codes, known = told
    assert (name, torch_device, chosen) == ("toy", "cpu", "TOY_ATTN")
    assert "-> TORCH_SDPA" in explained and "head_size is 80, takes 64" in explained
    assert "TOY_ATTN: it belongs to the platform toy; this device is cpu:avx2" in elsewhere
    assert codes == [0, 0, 0] and known == ["t1", "t2"]


def renamed(files: dict[str, str], words: dict[str, str]) -> dict[str, str]:
    """The toy platform under other names."""
    changed = {}
    for name, text in files.items():
        for old, new in words.items():
            name, text = name.replace(old, new), text.replace(old, new)
        changed[name] = text
    return changed


def test_two_platforms_of_plugins_stand_side_by_side_and_a_third_of_one_name_aside(
    site: Path,
) -> None:
    install(site, "a-toy", TOY_ENTRY, TOY)
    words = {"toy_plugin": "box_plugin", '"toy"': '"box"', "TOY_ATTN": "BOX_ATTN"}
    entry = TOY_ENTRY.replace("toy =", "box =").replace("TOY_ATTN", "BOX_ATTN")
    install(site, "b-box", entry.replace("toy_plugin", "box_plugin"), renamed(TOY, words))
    install(site, "c-toy", "[attnplat.platforms]\ntoy = other_plugin\n", {})
    told = ask(
        site,
        """
        import attnplat
        from attnplat.platforms import platform_names, plugins_here
        layer = attnplat.MhaConfig(head_size=64, num_heads=4, num_kv_heads=4)
        chosen = [attnplat.platform_for(d).select(layer).chosen.name for d in ("toy:t1", "box:t1")]
        problems = {p.distribution: p.problem and p.problem.text for p in plugins_here()}
        print(json.dumps([platform_names(), chosen, problems]))
        """,
    )
    names, chosen, problems = told
    assert names == ["cuda", "rocm", "toy", "box", "cpu"]
    assert chosen == ["TOY_ATTN", "BOX_ATTN"]
    assert problems.pop("c-toy") == "the plugin c-toy 1.0 declares toy, which a-toy 1.0 has"
    assert set(problems.values()) == {None}


BAD_DETECTORS = {
    "raises": "def detect():\n    raise SystemExit(1)\n",
    "returns-nothing": "def detect():\n    return None\n",
    "of-another": """
        from attnplat.platforms.detection import Detection
        from attnplat.platforms.device import DeviceInfo
        def detect():
            return Detection((DeviceInfo(platform="cuda", arch="sm90"),))
        """,
}


@pytest.mark.parametrize("name", BAD_DETECTORS)
def test_a_detector_that_fails_is_told_and_the_next_platform_is_taken(
    name: str, site: Path
) -> None:
    text = BAD_DETECTORS[name]
    indent = "        " if text.startswith("\n") else ""
    detector = text + f"\n{indent}def simulate(arch):\n{indent}    return None\n"
    install(site, "toy-plugin", TOY_ENTRY, {**TOY, "toy_plugin/detect.py": detector})
    done = run(
        site,
        """
        import attnplat
        print(json.dumps(attnplat.current_platform().name))
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0 and '"toy"' not in done.stdout, done.stderr
    assert "finding devices in the plugin toy-plugin 1.0 failed with" in done.stderr


def test_a_platform_that_is_set_aside_says_why_when_it_is_named(site: Path) -> None:
    install(
        site, "toy-plugin", TOY_ENTRY, {**TOY, "toy_plugin/detect.py": "import nothing_like_it"}
    )
    done = run(site, "from attnplat.cli.main import main\nraise SystemExit(main(['explain',"
               " '--device', 'toy:t1', '--head-size', '64']))")  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "install what provides the module nothing_like_it" in done.stderr
