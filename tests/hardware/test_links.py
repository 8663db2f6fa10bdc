import pytest

from gradus.hardware.links import Link, all_links, find_link, link_of
from gradus.schema.cluster import LinkNumbers


@pytest.mark.parametrize(
    ("name", "gb_per_second"),
    [
        ("NVLink 2", 150),
        ("NVLink 3", 300),
        ("nvlink-4", 450),
        ("NVLink 5.0", 900),
        ("PCIe 3", 15.75),
        ("PCIe 4.0 x16", 31.5),
        ("pcie gen5", 63),
        ("xGMI MI250X", 50),
        ("EDR", 12.5),
        ("HDR100", 12.5),
        ("InfiniBand HDR", 25),
        ("NDR", 50),
        ("InfiniBand XDR", 100),
        ("Slingshot-11", 25),
        ("Slingshot 10", 12.5),
        ("1GbE", 0.125),
        ("Ethernet 10", 1.25),
        ("25GbE", 3.125),
        ("Ethernet 100G", 12.5),
        ("Ethernet 200", 25),
        ("Ethernet 400", 50),
    ],
)
def test_a_link_is_found_by_its_usual_names_in_gigabytes_and_one_direction(name: str, gb_per_second: float) -> None:
    link = find_link(name)
    assert link is not None
    assert link.gb_per_second == gb_per_second


@pytest.mark.parametrize("name", ["", "NVLink", "PCIe", "InfiniBand", "HDR50", "NVLink 30"])
def test_a_name_that_does_not_say_which_link_is_none(name: str) -> None:
    assert find_link(name) is None


@pytest.mark.parametrize("link", all_links(), ids=lambda link: link.name)
def test_every_number_has_a_source(link: Link) -> None:
    assert link.sources["bandwidth"]
    assert ("latency" in link.sources) == (link.latency_us is not None)
    assert 0.1 < link.gb_per_second < 1000
    assert link.latency_us is None or 0.5 < link.latency_us < 50


def test_each_name_stands_for_one_link() -> None:
    assert all(find_link(name) is link for link in all_links() for name in (link.name, *link.also_called))


def test_a_cluster_names_a_link_or_gives_numbers_or_nothing() -> None:
    assert link_of("EDR") is find_link("InfiniBand EDR")
    own = link_of(LinkNumbers(name="ours", gb_per_second=3.5))
    assert own is not None
    assert (own.name, own.gb_per_second, own.latency_us) == ("ours", 3.5, None)
    assert link_of(None) is None
