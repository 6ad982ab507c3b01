"""The lab: a machine with RDMA and persistent memory, inside one that has neither.

A QEMU guest (emulated, so it needs no rights and no KVM) with a kernel of Debian that has Soft-RoCE
and NVDIMM. The host's root is its root, shared read-only, so what runs here runs there.
"""
