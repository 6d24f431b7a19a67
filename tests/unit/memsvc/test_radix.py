"""RadixTree against a dict of prefixes, and its structure."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from memsvc.core.radix import Node, RadixTree, path
from memsvc.wire.base import pack_tokens
from tests.support import hypothesis_profiles

PROFILE = hypothesis_profiles.load()
PAGE = 2
texts = st.lists(st.integers(0, 1), min_size=0, max_size=12).map(lambda tokens: tokens[: len(tokens) // PAGE * PAGE])


def insert(tree: RadixTree, tokens: list[int], first_page: int) -> Node:
    """Put a text in, with pages numbered from first_page where nothing is there yet."""
    packed, num_pages = pack_tokens(tokens), len(tokens) // PAGE
    root = tree.root("model", "")
    node, shared = tree.match(root, packed, num_pages)
    have = node.start + shared
    if 0 < shared < node.num_pages:
        node = tree.split(node, shared)
    if have == num_pages:
        return node
    pages = list(range(first_page, first_page + num_pages - have))
    return tree.append(node, packed[have * tree.page_bytes :], [pages, [p + 1000 for p in pages]])


def pages_of(node: Node, column: int) -> list[int]:
    return [page for part in path(node) for page in part.columns[column]]


def check_structure(tree: RadixTree) -> None:
    nodes = list(tree.nodes())
    assert tree.num_nodes == len(nodes)
    assert tree.num_pages == sum(node.num_pages for node in nodes)
    for node in nodes:
        assert node.parent is not None
        assert node.parent.end == node.start
        assert node.num_pages == len(node.columns[1]) == len(node.key) // tree.page_bytes > 0
        assert node.parent.children[bytes(node.key[: tree.page_bytes])] is node
        assert node.root is node.parent.root


@PROFILE
@given(texts=st.lists(texts, max_size=8), query=texts)
def test_match_finds_the_longest_known_prefix_and_its_pages(texts: list[list[int]], query: list[int]) -> None:
    tree, pages, first = RadixTree(PAGE, 2), {}, 1
    for tokens in texts:
        node = insert(tree, tokens, first)
        for index, page in enumerate(pages_of(node, 0), start=1):
            assert pages.setdefault(tuple(tokens[: index * PAGE]), page) == page
        first += 100
    check_structure(tree)
    expected = 0
    while (expected + 1) * PAGE <= len(query) and tuple(query[: (expected + 1) * PAGE]) in pages:
        expected += 1
    node, shared = tree.match(tree.root("model", ""), pack_tokens(query), len(query) // PAGE)
    assert node.start + shared == expected
    found = pages_of(node, 0)[:expected]
    assert found == [pages[tuple(query[: i * PAGE])] for i in range(1, expected + 1)]
    assert pages_of(node, 1)[:expected] == [page + 1000 for page in found]


@PROFILE
@given(texts=st.lists(texts, max_size=8), cuts=st.lists(st.integers(0, 99), max_size=6))
def test_truncating_and_joining_keep_the_rest_as_it_was(texts: list[list[int]], cuts: list[int]) -> None:
    tree = RadixTree(PAGE, 2)
    for index, tokens in enumerate(texts):
        insert(tree, tokens, 1 + 100 * index)
    for cut in cuts:
        leaves = [node for node in tree.nodes() if not node.children]
        if not leaves:
            break
        leaf = leaves[cut % len(leaves)]
        before = pages_of(leaf, 0)
        removed = tree.truncate(leaf, 1 + cut % leaf.num_pages)
        assert before[len(before) - len(removed[0]) :] == removed[0].tolist()
        check_structure(tree)
    for node in list(tree.nodes()):
        if node.parent and node.parent.parent and len(node.parent.children) == 1:
            whole = pages_of(node, 0)
            tree.absorb_parents(node, [node.parent])
            assert pages_of(node, 0) == whole
            check_structure(tree)
            break


def test_the_lower_half_of_a_split_keeps_its_identity() -> None:
    tree = RadixTree(PAGE, 2)
    node = insert(tree, [0, 1, 0, 1, 1, 1], 5)
    upper = tree.split(node, 1)
    assert (upper.columns[0].tolist(), node.columns[0].tolist()) == ([5], [6, 7])
    assert node.parent is upper
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 3)


def test_match_stops_at_the_number_of_pages_asked_for() -> None:
    tree = RadixTree(PAGE, 1)
    tree.append(tree.root("model", ""), pack_tokens([0, 1, 0, 1, 0, 1]), [[1, 2, 3]])
    node, shared = tree.match(tree.root("model", ""), pack_tokens([0, 1, 0, 1, 0, 1]), 2)
    assert (node.end, shared) == (3, 2)


def test_columns_left_out_are_tombstones() -> None:
    tree = RadixTree(PAGE, 3)
    node = tree.append(tree.root("model", ""), pack_tokens([0, 1]), [[7]])
    tree.extend(node, pack_tokens([1, 1]), [[8], [9]])
    assert node.columns == [array("i", [7, 8]), array("i", [0, 9]), array("i", [0, 0])]


def test_namespaces_do_not_see_each_other() -> None:
    tree = RadixTree(PAGE, 1)
    tree.append(tree.root("model", "a"), pack_tokens([0, 1]), [[1]])
    for root in (tree.root("model", "b"), tree.root("other", "a")):
        assert tree.match(root, pack_tokens([0, 1]), 1) == (root, 0)


def test_an_idle_namespace_is_forgotten_and_one_in_use_is_not() -> None:
    tree = RadixTree(PAGE, 1)
    root = tree.root("model", "s")
    node = tree.append(root, pack_tokens([0, 1]), [[1]])
    root.num_users = 1
    tree.truncate(node, 1)
    assert tree.root("model", "s") is root
    root.num_users = 0
    tree.forget_if_idle(root)
    assert not tree.roots
