"""Host time of converted models."""

from bench import host


def test_the_table_has_networks_of_both_kinds(monkeypatch, capsys):
    monkeypatch.setitem(host.CASES, "11 layers", host._deep(11, 1, 8))
    host.main(["--steps", "1", "--cases", "11 layers", "nothing to fuse, 1x8x8"])
    heads, _, deep, unfused, *_ = capsys.readouterr().out.splitlines()
    assert heads.split("  ")[0] == "network" and "us a unit" in heads
    assert deep.startswith("11 layers") and unfused.startswith("nothing to fuse")
