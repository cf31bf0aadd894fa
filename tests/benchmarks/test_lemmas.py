"""What holds of DynMo's lemmas 1 and 2, on a few cases."""

from benchmarks.lemmas import bound, lemma_1, lemma_2


def test_least_load_is_not_the_least_time_with_a_slow_link():
    fast, slow = lemma_1((0, 8))
    load, time = slow["least load"], slow["exact"]
    assert (load["layers"], load["span"], load["imbalance"]) == ((6, 6, 6, 6), 214, 0)
    assert (time["layers"], time["span"]) == ((7, 5, 5, 7), 205)
    assert slow["diffusion"]["span"] == 205
    for name in ("least load", "exact", "diffusion"):
        assert fast[name]["layers"] == (6, 6, 6, 6)


def test_diffusion_needs_fewer_rounds_than_the_lemma_allows():
    assert all(row["rounds"]["largest"] < row["bound"] for row in lemma_2(3))
    assert round(bound(24, 96)) == 7322
