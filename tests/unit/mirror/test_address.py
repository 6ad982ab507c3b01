"""Where a mirror is: what is understood, and what is refused without being repeated."""

from __future__ import annotations

import pytest

from portus.errors import UsageError
from portus.reach.mirror.address import StoreAddress, StoreKind, is_store, parse


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/runs/gpt", StoreAddress(StoreKind.S3, "bucket", "runs/gpt")),
        ("s3://bucket", StoreAddress(StoreKind.S3, "bucket", "")),
        ("s3://my.bucket-1//runs///gpt/", StoreAddress(StoreKind.S3, "my.bucket-1", "runs/gpt")),
        ("gs://bucket/a run/100%", StoreAddress(StoreKind.GOOGLE, "bucket", "a run/100%")),
        ("az://container/x", StoreAddress(StoreKind.AZURE, "container", "x")),
        ("file:///nfs/runs/gpt/", StoreAddress(StoreKind.FOLDER, "", "/nfs/runs/gpt")),
        ("file:///nfs/a@b?c#d", StoreAddress(StoreKind.FOLDER, "", "/nfs/a@b?c#d")),
        ("memory:mine", StoreAddress(StoreKind.MEMORY, "", "mine")),
    ],
)
def test_an_address_says_a_place_and_is_said_again(text: str, address: StoreAddress) -> None:
    assert is_store(text)
    assert parse(text) == address
    assert parse(str(address)) == address


def test_a_storage_host_is_no_mirror_and_the_error_says_what_copies_to_one() -> None:
    assert not is_store("portus://host")
    with pytest.raises(UsageError, match=r"a storage host is no mirror: .* --replica"):
        parse("portus://host")


@pytest.mark.parametrize(
    "text",
    [
        *("", "s3:", "s3:/bucket", "s3:///x", "s3://b", "s3://-bucket/x", "s3://bu cket/x"),
        *("S3://bucket/x", "http://bucket/x", "file://x", "file:///a/../b", "s3://bucket/a/./b"),
        *("s3://bucket/a\nb", "/nfs/runs"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="here"):
        parse(text, "here")


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:canary-7@bucket/x",
        "s3://canary-7@bucket/x",
        "s3://bucket/x?X-Amz-Signature=canary-7",
        "az://container?sv=1&sig=canary-7",
        "gs://bucket/x#canary-7",
        "https://AKIA:canary-7@host/bucket",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="environment") as refused:
        parse(text)
    assert "canary" not in str(refused.value)
