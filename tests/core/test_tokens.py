"""The token estimate never lets a prompt slip past its cap (LM-17): at least 60 % of what Qwen's tokenizer gives."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.tokens import estimate

DIGESTS = [hashlib.sha256(bytes([serial])) for serial in range(16)]
CODE = '''def settle(self, reserved: Reserved, usage: Usage | None, now: float) -> None:
    """Give the difference back."""
    self.concurrent -= 1
    if usage is None:
        self._spend(-1, -reserved.tokens, now)
    else:
        self._spend(0, usage.total - reserved.tokens, now)
'''

# (text, tokens by the public Qwen vocabulary of 151,643 merges)
COUNTED = {
    "english": (
        "The gateway reads each request once, bounds what it may ask for, and decides which pool of engines will "
        "answer it. A caller who asks for too much is told so at once, in one plain sentence that names the field "
        "and the remedy.",
        49,
    ),
    "german": (
        "Das Gateway liest jede Anfrage genau einmal, begrenzt, was sie verlangen darf, und entscheidet anschließend, "
        "welche Maschine antwortet.",
        36,
    ),
    "chinese": (
        "网关先读取每个请求，限制它可以要求的内容，然后决定由哪个引擎池来回答。"  # noqa: RUF001
        "如果调用者要求太多，它会立即用一句简单的话说明是哪个字段以及如何修正。",  # noqa: RUF001
        44,
    ),
    "rare chinese": ("龘靐齉爩鱻麤龗灪吁龖厵滟爨癵籱饢驫鲡鹂鸾", 33),
    "japanese": (
        "ゲートウェイは各リクエストを一度だけ読み、許される範囲に収め、どのエンジンが答えるかを決めます。",
        37,
    ),
    "korean": ("게이트웨이는 각 요청을 한 번만 읽고 허용되는 범위로 제한한 다음 어느 엔진이 답할지 결정합니다.", 38),
    "arabic": (
        "تقرأ البوابة كل طلب مرة واحدة، وتحدد ما يجوز له أن يطلبه، ثم تقرر أي مجموعة من المحركات سوف تجيب عنه.",
        36,
    ),
    "hindi": ("गेटवे हर अनुरोध को एक बार पढ़ता है और तय करता है कि कौन सा इंजन उत्तर देगा।", 70),
    "emoji": ("😀🎉🚀🔥🐍🌍💡🍕🎻🧪" * 10, 100),
    "joined emoji": ("\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 30, 300),
    "code": (CODE, 74),
    "digits": (
        "31415926535897932384626433832795028841971693993751058209749445923078164062862089986280348253421170679",
        101,
    ),
    "base64": (base64.b64encode(b"".join(each.digest() for each in DIGESTS)).decode(), 503),
    "hexadecimal": ("".join(each.hexdigest() for each in DIGESTS[:4]), 226),
    "spaces": (" " * 800, 7),
    "one letter": ("a" * 800, 100),
    "punctuation": ("!@#$%^&*()_+-=[]{}|;':,./<>?" * 10, 171),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_no_estimate_is_below_60_percent_of_the_count(kind: str) -> None:
    text, tokens = COUNTED[kind]
    assert estimate(text.encode()) >= 0.6 * tokens


@pytest.mark.parametrize("kind", ["english", "german", "japanese", "korean", "code", "digits", "hexadecimal"])
def test_ordinary_text_is_met_within_a_third(kind: str) -> None:
    text, tokens = COUNTED[kind]
    assert 0.67 <= estimate(text.encode()) / tokens <= 1.33


@pytest.mark.parametrize("text", ["字", "😀"])
def test_eight_thousand_wide_characters_do_not_pass_a_cap_of_4096(text: str) -> None:
    assert estimate((text * 8000).encode()) > 4096


@given(st.text())
def test_every_text_has_an_estimate_and_only_nothing_is_nothing(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    tokens = estimate(data)
    assert (tokens == 0) == (not data)
    assert tokens <= 2 * len(data)


@given(st.text(), st.text(alphabet="0123456789", min_size=1))
def test_more_text_is_never_fewer_tokens(text: str, more: str) -> None:
    assert estimate((text + more).encode()) >= estimate(text.encode())


def test_of_a_very_long_text_the_estimate_still_grows_with_its_length() -> None:
    text = b"the quick brown fox " * 52_429  # just over 1 MiB
    assert estimate(text * 4) == pytest.approx(4 * estimate(text), rel=0.01)
    assert estimate(b" " * (1 << 20) + b"x" * (1 << 21)) > 100_000  # cheap bytes in front do not hide the rest
