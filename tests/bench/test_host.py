"""Host time of converted models."""

from bench import host


def test_the_table_has_networks_of_both_kinds(monkeypatch, capsys):
    monkeypatch.setitem(host.CASES, "11 layers", host._deep(11, 1, 8))
    cases = ["--cases", "11 layers", "nothing to fuse, 1x8x8"]
    host.main(["--steps", "1", *cases, "--profile", "3"])
    profiles, _, rest = capsys.readouterr().out.partition("network  ")
    assert profiles.count("3 steps") == 3 and "run_backward" in profiles
    heads, _, deep, unfused, *_ = f"network  {rest}".splitlines()
    assert heads.split("  ")[0] == "network" and "us a unit" in heads
    assert deep.startswith("11 layers") and unfused.startswith("nothing to fuse")
