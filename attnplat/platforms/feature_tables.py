"""The catalogs and preferences as tables of words, for the docs and `attnplat backends`.

One table per operation and platform, one row per backend. What depends on the world is
written out: `A where it holds; else B`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnplat.backends.backend import MARK_MEANINGS, Backend, GraphSupport, Mark
from attnplat.backends.limits import Anything, Cases, Limit
from attnplat.config.names import AttnType, Feature, Operation
from attnplat.platforms import PLATFORMS, own_tables, tables_for
from attnplat.platforms.earned import Earned
from attnplat.platforms.rules import differences_of
from attnplat.platforms.selection import Preference, Ranked, Tables

Words = Callable[[Backend], str]

SPARSE = frozenset({Operation.SPARSE_MLA, Operation.BLOCK_SPARSE})
YES, NO = "yes", "-"


@dataclass(frozen=True)
class Table:
    """A titled table of words."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """The table in Markdown, with its title as a heading."""
        lines = [f"### {self.title}", ""]
        lines.append("| " + " | ".join(self.headers) + " |")
        lines.append("|" + "---|" * len(self.headers))
        lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in self.rows]
        return "\n".join(lines)


def _limit(name: str) -> Words:
    def words(backend: Backend) -> str:
        return in_words(backend.takes.get(name, Anything()))

    return words


@dataclass(frozen=True)
class FeatureWords:
    """Whether a backend takes a feature."""

    feature: Feature

    def __call__(self, backend: Backend) -> str:
        feature, features = self.feature, backend.features
        if not isinstance(features, Cases):
            return YES if feature in features else NO
        answers = {feature in value for value in features.values()}
        if len(answers) == 1:
            return YES if answers.pop() else NO
        holding = [_named(p) for p, value in features.cases if feature in value]
        return "where " + " or ".join(holding) if holding else "depends"


def _attn_types(backend: Backend) -> str:
    limit = backend.takes.get("attn_type")
    if limit is None:
        return "all" if Operation.MHA in backend.serves else str(AttnType.DECODER)
    return in_words(limit)


def _device(backend: Backend) -> str:
    return "; ".join(f"{k} {in_words(v)}" for k, v in backend.on.items()) or "any"


def _packages(backend: Backend) -> str:
    return ", ".join(p.feature or p.distribution for p in backend.requires) or NO


def _graphs(backend: Backend) -> str:
    if isinstance(backend.graphs, Cases):
        return in_words(backend.graphs)
    return GraphSupport(backend.graphs).name.lower()


def _layouts(backend: Backend) -> str:
    return "any" if backend.kv_layouts is None else in_words(backend.kv_layouts)


def _called(backend: Backend) -> str:
    plugin = getattr(backend, "plugin", "")
    return f"{backend.name} ({plugin})" if plugin else backend.name


COLUMNS: Mapping[str, Words] = {
    "backend": _called,
    "mark": lambda b: str(b.mark),
    "dtypes": _limit("dtype"),
    "KV dtypes": _limit("kv_cache_dtype"),
    "block sizes": _limit("block_size"),
    "head sizes": _limit("head_size"),
    "attention types": _attn_types,
    "sinks": FeatureWords(Feature.SINKS),
    "non-causal": FeatureWords(Feature.NON_CAUSAL),
    "sparse": lambda b: YES if b.serves & SPARSE else NO,
    "MM prefix": FeatureWords(Feature.MM_PREFIX),
    "DCP": FeatureWords(Feature.DCP),
    "device": _device,
    "needs": _packages,
}
FURTHER: Mapping[str, Words] = {
    "backend": _called,
    "window": FeatureWords(Feature.SLIDING_WINDOW),
    "soft cap": FeatureWords(Feature.LOGITS_SOFT_CAP),
    "ALiBi": FeatureWords(Feature.ALIBI),
    "V head size": FeatureWords(Feature.V_HEAD_SIZE),
    "LSE": FeatureWords(Feature.LSE),
    "tree mask": FeatureWords(Feature.TREE_MASK),
    "chunked": FeatureWords(Feature.CHUNKED_LOCAL),
    "RSWA": FeatureWords(Feature.RSWA),
    "head scales": FeatureWords(Feature.PER_HEAD_QUANT_SCALES),
    "batch invariant": FeatureWords(Feature.BATCH_INVARIANCE),
    "PCP": FeatureWords(Feature.PCP),
    "KV connector": FeatureWords(Feature.KV_CONNECTOR),
    "adaptive verification": FeatureWords(Feature.ADAPTIVE_VERIFICATION),
    "layouts": _layouts,
    "graphs": _graphs,
}


def feature_tables(
    platform: str,
    columns: Mapping[str, Words] = COLUMNS,
    tables: Tables | None = None,
    earned: Earned | None = None,
) -> Iterator[Table]:
    """One table per operation of a platform, in the catalog's order; plugins' backends too.

    `tables`: those to show in place of all that is installed. With `earned`, a backend that
    records verify is marked with the classes of devices they are of, and each feature that a
    backend with an adapter takes has a mark of its own.
    """
    catalog = (tables or tables_for(platform)).catalog
    for operation in Operation:
        rows = [b for b in catalog if operation in b.serves]
        if rows:
            yield Table(
                f"{platform}: {operation}",
                tuple(columns),
                tuple(
                    tuple(
                        words(b)
                        if earned is None
                        else _marked(words, b, earned, platform, operation)
                        for words in columns.values()
                    )
                    for b in rows
                ),
            )


def _marked(
    words: Words, backend: Backend, earned: Earned, platform: str, operation: Operation
) -> str:
    """A cell with the mark that records give."""
    text = words(backend)
    if words is COLUMNS["mark"]:
        on = [digest.arch for digest in earned.verifying(backend, platform, operation)]
        return f"{Mark.VERIFIED} ({', '.join(on)})" if on else text
    if text == NO or backend.loads is None or not isinstance(words, FeatureWords):
        return text
    proven = str(words.feature) in earned.features(backend, platform, operation)
    return f"{text}, {Mark.VERIFIED if proven else Mark.DECLARED}"


def priority_table(platform: str, tables: Tables | None = None) -> Table:
    """A platform's preferences, first match first, and the backends in no row."""
    tables = tables or tables_for(platform)
    rows = [_preference_row(row) for row in tables.preferences]
    rows += [("by name only", "", b.name, b.because) for b in tables.by_name]
    return Table(f"{platform}: preferences", ("for", "where", "order", "because"), tuple(rows))


def _preference_row(row: Preference) -> tuple[str, str, str, str]:
    where = [f"{name} {in_words(limit)}" for name, limit in row.on.items()]
    if row.when is not None:
        where.append(_named(row.when))
    return (
        ", ".join(sorted(row.serves)),
        "; ".join(where),
        ", ".join(_member(m) for m in row.order),
        row.because,
    )


def _member(member: str | Ranked) -> str:
    if isinstance(member, Ranked):
        return f"{member.name} (where {_named(member.when)})"
    return member


def in_words(value: Any) -> str:
    """A limit, a tuple of names, or `Cases` of them, in words."""
    if isinstance(value, Cases):
        parts = [f"{in_words(v)} where {_named(p)}" for p, v in value.cases]
        return "; ".join([*parts, f"else {in_words(value.otherwise)}"])
    if isinstance(value, Limit):
        return "any" if isinstance(value, Anything) else str(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "any" if value is None else str(getattr(value, "name", value)).lower()


def _named(predicate: Callable[..., bool]) -> str:
    return predicate.__name__.strip("_").replace("_", " ")


def backends_document(earned: Earned | None = None) -> str:
    """The whole of docs/backends.md; `earned` as in `feature_tables`."""
    lines = [
        "# Backends",
        "",
        "Generated from the catalogs by `make generate`; do not edit.",
        "",
        "Marks: " + "; ".join(f"**{m}** {text}" for m, text in MARK_MEANINGS.items()) + ".",
    ]
    if earned is not None:
        lines += [
            "A backend is verified for an operation, on the classes of devices in brackets, when",
            "the newest record of that class in `conformance/records/` shows a passed case of it,",
            "and no newest record of the platform shows a failure: one that does earns nothing,",
            "nor do the others of the platform. On every other class the backend is marked D. A",
            "feature is verified when one of those records shows a passed case with it; one marked",
            "D is claimed, and no case was run with it there.",
        ]
    for platform in PLATFORMS:
        own = own_tables(platform)
        lines += ["", f"## {platform}", "", priority_table(platform, own).to_markdown()]
        for columns in (COLUMNS, FURTHER):
            for table in feature_tables(platform, columns, own, earned):
                further = " (further features)" if columns is FURTHER else ""
                titled = Table(table.title + further, table.headers, table.rows)
                lines += ["", titled.to_markdown()]
    return "\n".join(lines) + "\n"


def differences_table(platform: str) -> Table:
    """Where other rule sets depart from a platform's tables."""
    rows = [
        (
            ", ".join(d.backends) or "all",
            d.subject,
            "; ".join(f"{name} {in_words(limit)}" for name, limit in d.where.items()) or "all",
            d.ours,
            d.because,
            d.source,
        )
        for d in differences_of(platform)
    ]
    headers = ("backend", "subject", "devices", "attnplat", "because", "their source")
    return Table(f"{platform}: differences", headers, tuple(rows))


def differences_document() -> str:
    """The whole of docs/selection-differences.md."""
    lines = [
        "# Where attnplat and vLLM 0.33 decide differently",
        "",
        "Generated from the `Difference` values beside the catalogs by `make generate`; do not",
        "edit. `--rules vllm-0.33` applies them: with it, `attnplat select --check` reproduces",
        "that engine's recorded decisions.",
    ]
    for platform in PLATFORMS:
        lines += ["", differences_table(platform).to_markdown()]
    return "\n".join(lines) + "\n"
