"""Names of dimensions: what they say, what they leave unsaid, and which items belong to them."""

import numpy as np
import pytest
import torch

from ncl_multi import metrics
from ncl_multi.codes.features import Features
from ncl_multi.codes.names import belongs, name_dimensions


def fired_by(*groups):
    """Features where each group of items fires a dimension of its own."""
    items = [item for group in groups for item in group]
    z = torch.zeros(len(items), len(groups))
    start = 0
    for dim, group in enumerate(groups):
        z[start : start + len(group), dim] = 1
        start += len(group)
    return Features(z, items=items)


def test_names_are_the_words_of_what_fires():
    items = [f"the {word} number {n}" for word in ("dog", "ship") for n in "abcdefgh"]
    z = torch.zeros(16, 4)
    z[:8, 0], z[8:, 1], z[:, 2] = 1, 1, 1
    assert name_dimensions(Features(z, items=items)) == ["dog", "ship", "mixed", ""]


def test_a_word_of_one_item_does_not_name_a_dimension():
    items = ["dog zebra", "dog", "dog", "cat", "cat", "cat zebra"]
    z = torch.tensor([[9.0], [1.0], [1.0], [0.0], [0.0], [0.0]])
    assert name_dimensions(Features(z, items=items)) == ["dog"]


def test_without_words_classes_name_and_without_both_nothing():
    z = torch.eye(2).repeat_interleave(4, dim=0)
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    named = Features(z, y=y, about={"classes": ["cat", "dog"]})
    assert name_dimensions(named) == ["cat", "dog"]
    assert name_dimensions(Features(z, y=y)) == ["class 0", "class 1"]
    assert name_dimensions(Features(z)) == ["", ""]


def test_names_follow_a_permutation_of_dimensions():
    generator = torch.Generator().manual_seed(0)
    words = ["red", "green", "blue", "round", "square"]
    z = torch.rand(60, 5, generator=generator) * (torch.rand(60, 5, generator=generator) < 0.4)
    items = [" ".join(w for w, x in zip(words, row, strict=True) if x > 0) or "-" for row in z]
    order = torch.tensor([3, 1, 4, 0, 2])
    names = name_dimensions(Features(z, items=items))
    assert names == words
    assert name_dimensions(Features(z, items=items), z[:, order]) == [words[n] for n in order]


def test_signed_codes_can_be_named_too():
    items = ["dog"] * 4 + ["ship"] * 4
    z = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4)
    assert name_dimensions(Features(z, items=items)) == ["dog"]


def test_stop_words_name_nothing():
    features = fired_by(["it is you", "it was you", "so it is"], ["what dog", "my dog", "dogs"])
    assert name_dimensions(features) == ["mixed", "dog"]


def test_one_word_in_its_forms_is_one_term():
    features = fired_by(
        ["he is surfing", "they surf", "a man surfs"], ["two women", "a woman", "the woman"]
    )
    assert name_dimensions(features)[1] == "woman"
    assert name_dimensions(features)[0].startswith("surf")


def test_words_that_stand_together_name_together():
    features = fired_by(
        ["an ice cream", "soft ice cream", "ice cream cone"],
        ["a red cup", "a cup", "cup of tea"],
        ["a bird", "birds", "one bird"],
    )
    assert name_dimensions(features) == ["ice cream", "cup", "bird"]
    assert name_dimensions(features, words=1)[0] in ("ice", "cream")


def test_words_with_a_comma_between_them_are_not_one_term():
    others = ["a cup", "my cup", "cup"], ["a bird", "birds", "one bird"]
    together = ["rock scale", "my rock scale", "a rock scale"]
    apart = [item.replace("rock", "rock,") for item in together]
    assert name_dimensions(fired_by(together, *others))[0] == "rock scale"
    assert name_dimensions(fired_by(apart, *others))[0] == "rock"


def test_two_words_that_never_meet_are_mixed():
    two_things = ["a dog", "my dog", "dogs", "a ship", "the ship", "ships"]
    assert name_dimensions(fired_by(two_things, ["tree"] * 10)) == ["mixed", "tree"]


def test_words_of_one_scene_join_to_a_name():
    scene = ["singing into a microphone", *["singing"] * 3, *["a microphone"] * 3]
    scene += ["lights", "a stage", "crowd", "night", "a drum"]
    name = name_dimensions(fired_by(scene, ["tree"] * 40, ["dog"] * 40))[0]
    assert set(name.split(", ")) == {"singing", "microphone"}


def test_dimensions_with_the_same_name_are_told_apart():
    features = fired_by(
        ["dog in snow", "dog, snow", *["a dog"] * 4],
        ["dog on a beach", "beach with a dog", *["a dog"] * 5],
        ["a tree"] * 12,
    )
    assert name_dimensions(features) == ["dog", "dog, beach", "tree"]
    assert name_dimensions(features, words=1) == ["dog", "dog", "tree"]


def test_a_name_does_not_repeat_a_word():
    hikes = [*["snow mountain"] * 3, *["mountain"] * 4]
    names = name_dimensions(fired_by(hikes, ["a mountain"] * 8, ["tree"] * 20, ["snow"] * 2))
    assert names == ["mountain: snow", "mountain", "tree", "snow"]


def test_classes_name_where_words_do_not():
    features = fired_by(["poodle", "beagle", "pug", "collie"], ["oak", "elm", "fir", "ash"])
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    labelled = Features(features.z, y, features.items, {"classes": ["dogs", "trees"]})
    assert name_dimensions(features) == ["", ""]
    assert name_dimensions(labelled) == ["dogs", "trees"]
    y[2] = y[5] = -1
    assert name_dimensions(labelled) == ["dogs", "trees"]


def test_equal_names_get_a_word_of_their_strongest_items():
    small, large = ["pug", "pug", "terrier", "poodle"], ["husky", "husky", "collie", "boxer"]
    features = fired_by(small, large, ["oak", "elm", "fir", "ash"])
    y = torch.tensor([0] * 8 + [1] * 4)
    labelled = Features(features.z, y, features.items, {"classes": ["dogs", "trees"]})
    names = name_dimensions(labelled)
    assert names in (["dogs", "dogs: husky", "trees"], ["dogs: pug", "dogs", "trees"])
    assert belongs("dogs: husky", labelled, 0)
    assert belongs("trees: husky", labelled, 4)
    assert not belongs("trees: husky", labelled, 0)
    assert name_dimensions(labelled, words=1) == ["dogs", "dogs", "trees"]


def test_a_class_and_its_word_are_equal_names():
    words = ["building, bank", "building, school", "building, hotel", "building, house"]
    others = ["tent", "tent", "castle", "tower"]
    features = fired_by(words, others, ["oak", "elm", "fir", "ash"] * 2)
    y = torch.tensor([0] * 4 + [1] * 4 + [2] * 8)
    classes = ["places", "buildings", "trees"]
    names = name_dimensions(Features(features.z, y, features.items, {"classes": classes}))
    assert names[2] == "trees"
    assert sorted(name.split(": ")[0] for name in names[:2]) == ["building", "buildings"]
    assert sum(": " in name for name in names) == 1


def test_a_class_names_where_it_holds_for_clearly_more_than_a_word():
    walkers = ["dog walk", "dog walk", "walk", "walk", "walk", "collie", "boxer", "terrier"]
    features = fired_by(walkers, ["oak", "elm", "fir", "ash"] * 4)
    for of_walkers, expected in (([0] * 8, "pets"), ([0] * 5 + [1] * 3, "walk")):
        y = torch.tensor([*of_walkers, *[2] * 16])
        about = {"classes": ["pets", "others", "trees"]}
        names = name_dimensions(Features(features.z, y, features.items, about))
        assert names == [expected, "trees"]


def test_attributes_name_where_labels_are_a_table():
    z = torch.eye(2).repeat(8, 1)
    factors = torch.stack([torch.arange(16) % 2, torch.arange(16) // 4], dim=1)
    named = Features(z, factors, about={"factors": ["shape", "size"]})
    assert name_dimensions(named) == ["shape 0", "shape 1"]
    assert name_dimensions(Features(z, factors)) == ["factor 0 0", "factor 0 1"]
    assert name_dimensions(Features(z, torch.rand(16))) == ["", ""]


def test_dimensions_that_fire_at_random_are_mixed():
    generator = torch.Generator().manual_seed(0)
    words = [f"{a}{b}{c}t" for a in "bdfg" for b in "aou" for c in "lmnr"]
    picks = torch.randint(len(words), (800, 6), generator=generator).tolist()
    items = [" ".join(words[word] for word in row) for row in picks]
    z = (torch.rand(800, 100, generator=generator) - 0.9).relu()
    names = name_dimensions(Features(z, items=items))
    assert names.count("mixed") >= 95


def test_an_item_belongs_to_a_name_that_it_contains_or_whose_class_it_has():
    features = Features(
        torch.ones(3, 1),
        torch.tensor([0, 1, -1]),
        ["Two dogs, running", "ice creams", "ice cream"],
        {"classes": ["light, film", "food"]},
    )
    rows = {
        "dog": [True, False, False],
        "cat, dog": [True, False, False],
        "ice cream": [False, True, True],
        "cream ice": [False, False, False],
        "light, film": [True, False, False],
        "food": [False, True, False],
        "do": [False, False, False],
    }
    for name, expected in rows.items():
        assert [belongs(name, features, row) for row in range(3)] == expected, name


def test_the_fit_of_names_is_the_share_of_the_ten_strongest_items_they_hold_for():
    items = ["dog"] * 7 + ["cat"] * 5 + ["ship"] * 12
    z = torch.zeros(24, 5)
    z[:12, 0] = torch.linspace(2, 1, 12)
    z[12:, 1] = 1
    z[:4, 2] = 1
    z[:, 3] = 1
    features = Features(z, items=items)
    names = ["dog", "ship", "dog", "mixed", ""]
    fit = metrics.name_fit(names, features)
    assert fit[:2] == pytest.approx([0.7, 1])
    assert np.isnan(fit[2:]).all()
    got = metrics.naming(names, features)
    assert got["name_fit"] == pytest.approx(0.85)
    assert got["named"] == pytest.approx(2 / 3)
    assert got["names_once"] == 1
    assert 0 < got["name_chance"] < 0.85
    assert metrics.naming(["ship", "ship", "", "", ""], features)["names_once"] == 0


def test_no_names_have_no_fit():
    features = fired_by(["dog"] * 6, ["cat"] * 6)
    assert metrics.naming(["mixed", ""], features) == {"named": 0}
    with pytest.raises(ValueError, match="one name per dimension: 2, got 1"):
        metrics.naming(["dog"], features)
