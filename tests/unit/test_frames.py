"""Whose frame is it: ours by the names of our own files, the system's, or the user's, whose project may have folders called like ours."""

from __future__ import annotations

import pytest

from harness.frames import is_ours, is_users


@pytest.mark.parametrize(
    ("file", "ours", "users"),
    [
        ("/home/u/train.py", False, True),
        ("/home/u/harness/launch/job_of_mine.py", False, True),
        ("/home/u/harness/probe/train.py", False, True),
        ("/opt/x/harness/probe/sensors/backward.py", True, False),
        ("/opt/x/harness/launch/warm_rank.py", True, False),
        ("<harness warm_rank>", True, False),
        ("/v/lib/python3.11/site-packages/torch/nn/module.py", False, False),
        ("<frozen runpy>", False, False),
        ("<string>", False, False),
        ("", False, False),
    ],
)
def test_frames(file: str, ours: bool, users: bool) -> None:
    assert (is_ours(file), is_users(file)) == (ours, users)
