"""What a prompt looks like to the tier classifier: counts of cues in several languages, nothing learnt."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.core.tokens import estimate
from gateway.core.types import Prompt

EXCERPT = 2000
_OPENING = 80
_SHORT_REPLY = 30
_LONG_WORD = 4
_WIDE_WORD = 1.5

# Cues are looked up, not matched: one pass over the words, then set intersections (a big alternation costs 50x more).
_WORD = re.compile(r"[a-z][a-z+#]*")

# What is asked for, when it takes work.
_ACTS = frozenset(
    "prove proof derive implement design redesign debug refactor optimize optimise architect solve "
    "analyze analyse compare evaluate plan write build reason simulate essay report justify rigorously "
    "tradeoffs trade step".split()
)
# Of these, the ones that take reasoning whatever they are asked about, if there is something to reason about.
_HARD_ACTS = frozenset(
    "prove proof derive implement design redesign debug refactor solve reason analyze analyse evaluate "
    "justify optimize optimise simulate architect".split()
)
_HARD_PHRASES = ("show that", "step by step", "step-by-step", "explain why", "counterexample", "deadlock")
# Words that ask for effort without saying what about; they are no substance.
_EMPTY = frozenset(
    "this that with please very extremely highly really complex complicated difficult hard important everything "
    "anything something carefully thorough thoroughly detailed best weigh trade offs step morning thanks".split()
)
# What it is asked about, when the subject is demanding.
_SUBJECTS = frozenset(
    "theorem lemma prime primes irrational integral derivative equation equations matrix matrices "
    "eigenvalue eigenvalues probability group groups polynomial inequality induction infinitely sqrt root "
    "algorithm algorithms complexity function functions class classes python rust java javascript "
    "typescript golang c++ sql regex code script program api database schema thread concurrency "
    "concurrent deadlock race mutex lock cache compiler kernel distributed microservice microservices "
    "architecture ledger region invariant invariants consensus replication protocol encryption contract "
    "lawsuit diagnosis differential strategy novel chapter thesis recursion recursive asynchronous async "
    "linked binary tree graph queue parser unit tests quicksort mergesort heap stack trie html css docker "
    "kubernetes react component numpy pandas gradient softmax entropy vertex continuous metric compact "
    "topology limit modulo permutation permutations combinatorics quadratic sharded migration".split()
)
# Short, clear intents, said in the first words; questions of fact only if they open the text.
_LIGHT = frozenset(
    "translate translation classify classification extract summarize summarise summary rephrase rewrite "
    "reformat convert spell proofread correct sentiment label capital hello".split()
)
_LIGHT_FIRST = frozenset("what who when where define hi hey thanks thank list".split())
_WIDE_HARD = tuple(
    "证明 推导 推理 实现 设计 调试 重构 优化 求解 分析 逐步 一步一步 証明 推論 実装 設計 最適化 "
    "أثبت اثبت برهن صمم حلل".split()
)
_WIDE_ACTS = tuple(
    "证明 推导 实现 设计 调试 重构 优化 求解 分析 比较 规划 编写 写一 逐步 权衡 証明 実装 設計 最適化 "
    "解いて 書いて أثبت اثبت برهن صمم نفذ حلل اكتب".split()
)
_WIDE_SUBJECTS = tuple(
    "定理 引理 素数 素因子 有限群 无理数 积分 导数 方程 矩阵 概率 多项式 不等式 归纳 算法 复杂度 函数 "
    "代码 程序 脚本 数据库 并发 死锁 缓存 编译 分布式 架构 微服务 协议 加密 不变量 合同 诉讼 论文 無理数 "
    "積分 行列 確率 関数 コード プログラム アルゴリズム データベース 素因数 群の نظرية أولي زمرة خوارزمية "
    "دالة برنامج معادلة".split()
)
_WIDE_LIGHT = tuple(
    "翻译 分类 提取 抽取 总结 摘要 改写 转换 纠正 情感 你好 谢谢 翻訳 分類 抽出 要約 こんにちは "
    "ありがとう ترجم صنف استخرج لخص مرحبا شكرا".split()
)
_CODE = ("```", "def ", "#include", "SELECT ", "Traceback", "=> ", "();", ") {")
_MATH = ("\\frac", "\\sum", "\\int", "\\sqrt", "\\begin", "$$", "∑", "∫", "√", "≤", "≥", "∀", "∃", "^2", "^n")
_ASSENT = re.compile(
    r"^\W*(y|yes|yep|yeah|ok(ay)?|sure|please( do)?|go( ahead| on)?|continue|do it|proceed|sounds good|approved?|"
    r"是的?|好的?|可以|继续|行|はい|続けて|お願いします|نعم|حسنا|تابع)\W*$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Features:
    """Counts of distinct cues in the turn that decides; `tokens` is its own estimated length.

    `hard`: the act asked for takes reasoning; `substance`: distinct words (or wide characters / 1.5) it is about.
    """

    tokens: int
    acts: int
    subjects: int
    hard: bool
    substance: int
    light: bool
    code: bool
    math: bool
    turns: int
    tools: int


def extract(prompt: Prompt) -> Features:
    """Features of the turn that decides: the last user turn, or what it says yes to if it is a bare assent.

    A system prompt never decides (every request of an application carries the same one).
    """
    text = prompt.text
    if len(text) <= _SHORT_REPLY and _ASSENT.match(text):
        text = f"{prompt.context}\n{prompt.reply}"
    text = text[:EXCERPT]
    opening, lower = text[:_OPENING], text.lower()
    words = set(_WORD.findall(lower))
    acts, subjects = len(_ACTS & words), len(_SUBJECTS & words)
    hard = not _HARD_ACTS.isdisjoint(words) or _present(_HARD_PHRASES, lower) > 0
    substance = sum(len(word) >= _LONG_WORD for word in words - _EMPTY - _HARD_ACTS - _LIGHT)
    first_words = _WORD.findall(opening.lower())
    light = not _LIGHT.isdisjoint(first_words) or not _LIGHT_FIRST.isdisjoint(first_words[:1])
    if not text.isascii():
        acts += _present(_WIDE_ACTS, text)
        subjects += _present(_WIDE_SUBJECTS, text)
        hard = hard or _present(_WIDE_HARD, text) > 0
        substance += round(sum(map(_is_wide, text)) / _WIDE_WORD)
        light = light or _present(_WIDE_LIGHT, opening) > 0
    return Features(
        tokens=estimate(text.encode("utf-8", "replace")),
        acts=acts,
        subjects=subjects,
        hard=hard,
        substance=substance,
        light=light,
        code=_present(_CODE, text) > 0,
        math=_present(_MATH, text) > 0,
        turns=prompt.turns,
        tools=prompt.tools,
    )


def _is_wide(character: str) -> bool:
    return "\u0600" <= character <= "\u06ff" or character >= "\u3040"


def _present(cues: tuple[str, ...], text: str) -> int:
    return sum(cue in text for cue in cues)
