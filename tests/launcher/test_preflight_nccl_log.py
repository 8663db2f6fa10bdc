"""NCCL's log says over which network ranks talk; the lines are as its releases print them."""

from __future__ import annotations

from gradus.launcher.preflight.nccl_log import read_nccl_log

INFINIBAND = """\
gpu01:929:929 [2] NCCL INFO Bootstrap : Using ib0:10.5.5.50<0>
gpu01:929:929 [2] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
gpu01:929:929 [2] NCCL INFO NET/IB : Using [0]mlx5_3:1/IB [1]mlx5_2:1/IB [RO]; OOB ib0:10.5.5.50<0>
gpu01:929:929 [2] NCCL INFO Using network IB
gpu01:929:1040 [2] NCCL INFO Channel 00/02 :    0   1
gpu01:929:1040 [2] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC/read
gpu01:929:1040 [2] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
gpu01:929:1040 [2] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA
"""
SOCKETS = """\
ip-10-0-0-1:45361:45361 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
ip-10-0-0-1:45361:45361 [0] NCCL INFO NET/IB : No device found.
ip-10-0-0-1:45361:45361 [0] NCCL INFO NET/Socket : Using [0]ens3:10.0.0.1<0>
ip-10-0-0-1:45361:45361 [0] NCCL INFO Using network Socket
ip-10-0-0-1:45361:45400 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
LIBFABRIC = """\
algo-1:18057:18130 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
algo-1:18057:18130 [0] NCCL INFO Using network AWS Libfabric
algo-1:18057:18130 [0] NCCL INFO Ring 00 : 7 -> 8 [receive] via NET/AWS Libfabric/0
"""
# NCCL 2.4 names the sockets of its own messages first.
OLD_INFINIBAND = """\
node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
node:20:289 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
"""


def test_infiniband_is_recognised_with_its_devices_and_channels():
    found = read_nccl_log(INFINIBAND)
    assert found.network == "IB"
    assert found.devices == ("mlx5_3:1/IB", "mlx5_2:1/IB")
    assert found.channels == {"P2P/IPC": 1, "NET/IB": 2}
    assert not found.over_sockets


def test_a_fall_back_to_sockets_is_seen_with_the_reason():
    found = read_nccl_log(SOCKETS)
    assert found.over_sockets
    assert found.devices == ("ens3:10.0.0.1<0>",)
    assert "NET/IB : No device found" in " ".join(found.reasons)


def test_a_plugin_network_is_no_socket():
    found = read_nccl_log(LIBFABRIC)
    assert found.network == "AWS Libfabric"
    assert found.channels == {"NET/AWS Libfabric": 1}
    assert not found.over_sockets


def test_the_sockets_of_its_own_messages_do_not_count():
    assert not read_nccl_log(OLD_INFINIBAND).over_sockets


def test_channels_decide_over_what_was_announced():
    assert read_nccl_log(INFINIBAND.replace("via NET/IB/", "via NET/Socket/")).over_sockets


def test_a_node_alone_uses_no_network():
    inside = "n1:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC\n"
    assert read_nccl_log(inside).network is None
    assert not read_nccl_log(inside).over_sockets


def test_other_words_say_nothing():
    assert read_nccl_log("hello NET/Socket : Using [0]eth0\n").network is None
