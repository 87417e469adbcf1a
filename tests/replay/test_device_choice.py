"""The description of a device: what it refuses, and what of it decides a measurement."""

from pathlib import Path
from typing import Any

import pytest

from replay.device_choice import DeviceChoice
from traces import InputError


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("virtual", {"host_dedup": 3}),
        ("virtual", {"verify": True}),
        ("virtual", {"dense": "none"}),
        ("virtual", {"threads": 2}),
        ("cuda", {"threads": 2}),
        ("cpu", {"lanes": 2}),
        ("cuda", {"store": Path("experts")}),
        ("disk", {"host_dedup": 3}),
    ],
)
def test_an_option_that_would_do_nothing_on_the_device_is_refused(device: str, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=f"`{name}`: .*leave it out"):
        DeviceChoice(device, **options)
    assert DeviceChoice("auto", **options), "refused once the device is known"


@pytest.mark.parametrize(
    "options", [{"lanes": 0}, {"threads": 257}, {"host_dedup": 0}, {"dense": "perhaps"}, {"device": "tpu"}, {"lane": 2}]
)
def test_values_outside_of_the_limits_at_a_field_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        DeviceChoice.of(options)
