"""A test that leaves a change of its process fails, and the next test does not see the change."""

from __future__ import annotations

from toy import Toy

LEAVES = """
import gc, logging, os, signal

def test_variable(): os.environ["LEFT"] = "1"
def test_changed(): os.environ["GIVEN"] = "2"
def test_taken_away(): del os.environ["GIVEN"]
def test_directory(tmp_path): os.chdir(tmp_path)
def test_level(): logging.root.setLevel(5)
def test_handler(): signal.signal(signal.SIGTERM, lambda *_: None)
def test_collector(): gc.set_threshold(1, 2, 3); gc.freeze()
def test_undone(monkeypatch, tmp_path): monkeypatch.setenv("LEFT", "1"); monkeypatch.chdir(tmp_path)
def test_next(request):
    assert "LEFT" not in os.environ and os.environ["GIVEN"] == "1" and os.getcwd() == str(request.config.rootpath)
    assert logging.root.level != 5 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert gc.get_threshold() != (1, 2, 3) and gc.get_freeze_count() == 0
"""


def test_each_leftover_fails_its_test_and_is_undone(toy: Toy) -> None:
    toy.write("test_one.py", LEAVES)
    toy.environ["GIVEN"] = "1"
    done = toy.run("-p", "suite.leftovers")
    assert "9 passed, 6 errors" in done.stdout, done.stdout
    assert "LEFT: None -> '1'" in done.stdout
