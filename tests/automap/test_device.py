"""Profiles: rates between measured shapes, those that are shipped, and what is wrong with a file, in one line."""

import json
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from hybridflow.automap.device import PROFILES, DeviceProfile, ProductRates, load_profile, shipped_profiles
from hybridflow.errors import ConfigError
from tests.automap.round_profile import FIELDS


def write(directory: Path, fields: dict[str, Any]) -> Path:
    path = directory / "own.json"
    path.write_text(json.dumps(fields))
    return path


def test_a_measured_shape_has_its_own_rate_and_one_between_the_mean_of_logarithms() -> None:
    rates = ProductRates(table=((4, 8, 8, 100.0), (16, 8, 8, 400.0)))
    assert rates.rate(4, 8, 8) == pytest.approx(100.0)
    assert rates.rate(8, 8, 8) == pytest.approx(200.0)  # as far from both
    # a third of the way in logarithms: weights 1 / (1/3)^2 and 1 / (2/3)^2, that is 4 : 1
    at = 4 * 4 ** (1 / 3)
    assert rates.rate(at, 8, 8) == pytest.approx(exp((4 * log(100.0) + log(400.0)) / 5))


def test_a_shipped_profile_has_the_name_that_it_alone_begins_with() -> None:
    assert load_profile("h100").name == load_profile("h100-sxm").name and load_profile("l40").name == "L40S"
    with pytest.raises(
        ConfigError, match=r"profile h: no such file, and none of that name is shipped: .*h100-sxm, h200"
    ):
        load_profile("h")


def test_a_peak_is_reached_by_large_products_and_half_at_half_size() -> None:
    rates = ProductRates(peak=1000.0, efficiency=0.8, half_size=10.0)
    assert rates.rate(10, 99, 99) == pytest.approx(400.0)
    assert rates.rate(99, 99, 1e9) == pytest.approx(800.0 * 99 / 109)
    assert rates.rate(1e9, 1e9, 1e9) == pytest.approx(800.0)


def test_crowding_is_on_straight_lines_between_what_was_measured() -> None:
    rows = [{"ranks": 2, "training": 1.0, "engine": 1.5}, {"ranks": 6, "training": 3.0, "engine": 2.5}]
    profile = DeviceProfile.model_validate(FIELDS | {"crowding": rows})
    assert [profile.crowded(busy, engine=False) for busy in (1, 2, 4, 6, 9)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert [profile.crowded(busy, engine=True) for busy in (0, 1, 2, 4)] == [1.0, 1.25, 1.5, 2.0]


def test_every_shipped_profile_loads_and_says_that_it_was_not_measured_here() -> None:
    assert {"a100-80gb-sxm", "h100-sxm", "h200", "l40s"} <= set(shipped_profiles())
    for name in shipped_profiles():
        profile = load_profile(name)
        assert not profile.measured
        numbers = set(json.loads((PROFILES / f"{name}.json").read_text())) - {"name", "measured", "sources"}
        assert numbers <= profile.sources.keys(), f"{name}: each number has a source"


def test_a_written_profile_is_read_as_it_was(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, FIELDS))
    assert load_profile(write(tmp_path, json.loads(profile.model_dump_json()))) == profile


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"memory_bandwith": 1.0}, "memory_bandwith = 1.0: Extra inputs are not permitted"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth = -1.0: Input should be greater than 0"),
        ({"inside": {"bandwidth": 1.0}}, "inside.latency: Field required"),
        ({"products": {}}, "products: give the rates of a dtype at least"),
        ({"products": {"float32": {}}}, "products.float32 = {}: give either a table of measured shapes or a peak"),
        (
            {"products": {"float32": {"table": [[1, 2, 0, 1.0]]}}},
            "products.float32.table.0.2 = 0: Input should be greater than 0",
        ),
        ({"sources": {"products": "x"}}, "sources: between has none: say where the number comes from"),
        ({"sources": FIELDS["sources"] | {"speed": "x"}}, "sources: speed is no field of a profile"),
    ],
)
def test_what_is_wrong_is_told_by_file_field_value_and_rule(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path, FIELDS | change)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(caught.value) == f"{path}: {expected}"


def test_a_profile_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"profile h1000: no such file, and none of that name is shipped: a100-80gb"):
        load_profile("h1000")


def test_a_dtype_without_rates_is_told(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, FIELDS | {"products": {"float32": {"peak": 1.0}}}))
    with pytest.raises(ConfigError, match="profile round: products has no bfloat16, it has float32"):
        profile.product_rates("bfloat16")
