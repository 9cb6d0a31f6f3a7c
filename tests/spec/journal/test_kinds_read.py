"""What is rare in a long journal is found without a look at each line, and nothing of it is passed over."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.journal import reading
from paceline.spec.journal.reading import records_of_kind

LINES = st.lists(
    st.one_of(
        st.builds(
            lambda kind, note: json.dumps({"kind": kind, "note": note}).encode(),
            st.sampled_from(["step", "decision", "evaluation", "fault"]), st.text(max_size=12),
        ),
        st.binary(max_size=9).map(lambda some: some.replace(b"\n", b" ")),
        st.just(b'{"kind": "decision", "no'),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    lines=LINES, ends=st.sampled_from([b"", b"\n"]), block=st.integers(1, 90),
    kinds=st.sets(st.sampled_from(["step", "decision", "evaluation"]), min_size=1),
)  # fmt: skip
def test_records_of_a_kind_are_those_of_all_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bytes, block: int, kinds: set[str]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "0001.jsonl"
    path.write_bytes(b"\n".join(lines) + ends)
    known = [parsed for line in lines if (parsed := reading.parsed_line(line)) and parsed["kind"] in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", block)
        assert list(records_of_kind(path, *sorted(kinds))) == known
