"""The printed report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch

from fsdp_compile.explain import explain
from fsdp_compile.explain.exposure import milliseconds
from fsdp_compile.explain.parts import UnitReport
from fsdp_compile.explain.render import fold
from tests.common.models import Transformer
from tests.fsdp_compile.explain.test_explain import report_of

pytestmark = pytest.mark.units_apart

torch_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="graphs, and so numbers, of torch 2.13")


class TestRender(expecttest.TestCase):
    @pytest.mark.night
    @torch_2_13
    def test_small_gpt(self) -> None:
        with torch.device("meta"):
            model = Transformer(vocab=4096, dim=512, heads=8, hidden=2048, layers=2).bfloat16()
        tokens = torch.empty(8, 16, dtype=torch.long, device="meta")
        self.assertExpectedInline(
            str(explain(model, tokens, (8,), "h100")),
            """\
A step on H100, ranks: 8 (shard). Everything is what one rank does.

step 0.56 ms, exposed communication 0.103 ms (18.3%), 228,386 tokens/s (128 a step)
0.006468 TFLOP of the model (0.006472 with what is recomputed), MFU 1.2% of 989 TFLOP/s in bfloat16
of the step, the optimizer (adamw) takes 0.00609 ms

unit                       parameters     shards    gathers    reduces    compute  in flight    exposed  kernels  collectives
root                          4.195 M      1 MiB  7.002 MiB  7.002 MiB  0.0922 ms  0.0988 ms  0.0695 ms       10            2
blocks.0 ... blocks.1 (2)     6.299 M  1.502 MiB  21.02 MiB  10.51 MiB   0.359 ms   0.263 ms  0.0332 ms       62            6
total                         10.49 M  2.502 MiB  28.02 MiB  17.51 MiB   0.452 ms   0.362 ms   0.103 ms       72            8
A line of several units is their sum. Bytes of communication are what is sent.

graph         begins     takes    exposed     TFLOP  collectives  peak memory
0 forward       0 ms  0.211 ms  0.0538 ms  0.002156            3    28.29 MiB
1 backward  0.211 ms  0.343 ms   0.049 ms  0.004316            5    42.28 MiB

memory                at the peak    at most
shards                  2.502 MiB  2.502 MiB
optimizer state         5.004 MiB  5.004 MiB
buffers and the like        4 KiB      4 KiB
gathered parameters           0 B  18.52 MiB
activations              1022 KiB  5.761 MiB
gradients               13.51 MiB  13.51 MiB
communication           12.01 MiB  22.01 MiB
working memory           8.25 MiB    8.5 MiB
total                   42.28 MiB
The peak is in backward, at root. Of the buckets, blocks.1 holds most then: 6.758 MiB.

Of 0.56 ms, 0.103 ms are exposed:
- 0.0394 ms: the reduction of root in backward, because what runs beside it hides 0.00999 ms of its 0.0494 ms
- 0.0301 ms: the gather of root in forward, because what runs beside it hides 0.0193 ms of its 0.0494 ms
- 0.0237 ms: the gather of blocks.0 in forward, because its link is busy with the gather of root until then
- 0.00956 ms: others

Tried with the same models:
- options={'schedule': 'auto'}: 0.56 ms, no faster; memory 36.27 MiB, 6.007 MiB less
- reshard_after_forward=False: 0.5 ms, 0.0605 ms faster; memory 42.28 MiB, 0 B more
""",
        )


def test_units_that_repeat_are_one_line() -> None:
    units = [UnitReport("root", 5), *(UnitReport(f"layers.{index}", 3, compute_ns=index) for index in range(4))]
    units += [UnitReport("layers.4", 7), UnitReport("other.5", 7)]
    assert [(unit.name, unit.parameters, unit.compute_ns, count) for unit, count in fold(units)] == [
        ("root", 5, 0, 1),
        ("layers.0 ... layers.3 (4)", 12, 6, 4),
        ("layers.4", 7, 0, 1),
        ("other.5", 7, 0, 1),
    ]


def test_step_of_several_calls() -> None:
    text = str(report_of("microbatches"))
    assert "3 backward" in text and "all-reduces" not in text
    assert "all-reduces" in str(report_of("hsdp"))


@pytest.mark.night
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="docs/explain.md shows the numbers of graphs of torch 2.13"
)
def test_page_shows_what_its_code_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)\n^```$", page, flags=re.DOTALL | re.MULTILINE)
    code, shown, _, formulae, largest = (text for _, text in blocks[:5])
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert capsys.readouterr().out.strip() == shown
    assert str(scope["report"].formulae).startswith(formulae)
    assert str(scope["report"].at(S=16384).formulae).startswith(largest)
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "step.png", "step.html"}


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 ms"), (37_600, "0.0376 ms"), (52_840_000, "52.8 ms"), (1_234_000_000, "1,234 ms")]
)
def test_times_are_readable(ns: int, text: str) -> None:
    assert milliseconds(ns) == text
