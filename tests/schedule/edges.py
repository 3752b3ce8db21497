"""Edges between stages, for tests of whatever may be between them."""

from hypothesis import strategies as st

from fxpar.schedule import Edge


@st.composite
def edge_lists(draw: st.DrawFn, num_stages: int) -> list[Edge]:
    """Edges between any stages, several between the same two among them."""
    edges = []
    for index in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, num_stages - 2))
        targets = draw(st.sets(st.integers(source + 1, num_stages - 1), min_size=1))
        edges.append(Edge(f"e{index}", source, tuple(sorted(targets)), draw(st.booleans())))
    return edges
