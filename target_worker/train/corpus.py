"""`python -m target_worker.train.corpus`: the texts that the embedded model is trained on, with where each is from.

Needs the package registries that apt-get and pip are set up for. The same versions and seed give the same corpus.
"""

import argparse
import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from target_worker.train.documents import Document, Sieve, clean
from target_worker.train.packages import Unavailable
from target_worker.train.sources import SOURCES, Source

MANIFEST = "manifest.json"
SUFFIX = ".jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """What the corpus holds of one source."""

    source: str
    licence: str
    version: str
    documents: int
    bytes: int
    held_out_documents: int
    """Of documents, those never trained on."""
    held_out_bytes: int
    dropped: dict[str, int]
    """Reason -> documents left out; capped: there was enough without them."""
    sha256: str
    """Of all texts one after another, a zero byte behind each."""


def gather(source: Source, cache: Path, sieve: Sieve, max_bytes: int, seed: int) -> tuple[list[Document], SourceRecord]:
    """The documents of a source, at most max_bytes of them in random order. Raises Unavailable."""
    tree = source.package.unpack(cache)
    raw = list(source.read(tree.root))
    if not raw:
        raise Unavailable(f"version {tree.version} holds none of the files looked for")
    random.Random(seed).shuffle(raw)
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    num_bytes = 0
    for name, text in raw:
        text = clean(text)
        if num_bytes + len(text.encode()) > max_bytes:
            dropped["capped"] += 1
        elif (objection := sieve.objection(text)) is not None:
            dropped[objection] += 1
        else:
            documents.append(Document(source=source.name, name=name, text=text))
            num_bytes += len(text.encode())
    return documents, _record(source, tree.version, documents, dropped)


def write_corpus(sources: Sequence[Source], out: Path, cache: Path, max_bytes: int, seed: int) -> list[SourceRecord]:
    """One file for each source that can be had, and the manifest. What cannot be had is logged and listed there."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"*{SUFFIX}"):
        old.unlink()
    sieve = Sieve()
    records, skipped = [], {}
    for source in sources:
        try:
            documents, record = gather(source, cache, sieve, max_bytes, seed)
        except Unavailable as error:
            logger.warning("source skipped source=%s reason=%s", source.name, error)
            skipped[source.name] = str(error)
            continue
        lines = [json.dumps({"name": document.name, "text": document.text}) + "\n" for document in documents]
        (out / f"{source.name}{SUFFIX}").write_text("".join(lines), "ascii")
        logger.info("source read source=%s documents=%d bytes=%d", source.name, record.documents, record.bytes)
        records.append(record)
    content = {"sources": [asdict(record) for record in records], "skipped": skipped, "seed": seed}
    (out / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", "ascii")
    return records


def read_corpus(folder: Path) -> Iterator[Document]:
    """All documents, in the order of the manifest. Raises ValueError if there is none or a file is damaged."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no {MANIFEST}: python -m target_worker.train.corpus --out {folder} makes it")
    for record in json.loads((folder / MANIFEST).read_text("ascii"))["sources"]:
        digest = hashlib.sha256()
        with (folder / f"{record['source']}{SUFFIX}").open(encoding="ascii") as file:
            for line in file:
                document = Document(source=record["source"], **json.loads(line))
                digest.update(document.text.encode() + b"\0")
                yield document
        if digest.hexdigest() != record["sha256"]:
            raise ValueError(f"{record['source']}{SUFFIX} is not the file of the manifest in {folder}")


def _record(source: Source, version: str, documents: Sequence[Document], dropped: Counter[str]) -> SourceRecord:
    encoded = [document.text.encode() for document in documents]
    held_out = [len(text) for document, text in zip(documents, encoded, strict=True) if document.held_out]
    digest = hashlib.sha256()
    for text in encoded:
        digest.update(text + b"\0")
    return SourceRecord(
        source=source.name,
        licence=source.licence,
        version=version,
        documents=len(documents),
        bytes=sum(map(len, encoded)),
        held_out_documents=len(held_out),
        held_out_bytes=sum(held_out),
        dropped=dict(sorted(dropped.items())),
        sha256=digest.hexdigest(),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the corpus and print what is in it."""
    parser = argparse.ArgumentParser(prog="python -m target_worker.train.corpus", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder of the corpus")
    parser.add_argument("--cache", type=Path, help="folder of fetched packages (default: packages in --out)")
    parser.add_argument("--cap-mb", type=float, default=25.0, help="most megabytes of one source (default 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents (default 0)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    cache = (args.cache or args.out / "packages").absolute()
    records = write_corpus(SOURCES, args.out, cache, int(args.cap_mb * 1e6), args.seed)
    print(f"{'source':16}{'licence':30}{'documents':>10}{'MB':>8}{'held out':>9}  version, dropped")
    for r in records:
        dropped = " ".join(f"{reason}={num}" for reason, num in r.dropped.items())
        mb = r.bytes / 1e6
        print(f"{r.source:16}{r.licence:30}{r.documents:>10}{mb:>8.2f}{r.held_out_documents:>9}  {r.version} {dropped}")
    print(f"{'all':46}{sum(r.documents for r in records):>10}{sum(r.bytes for r in records) / 1e6:>8.2f}")


if __name__ == "__main__":
    main()
