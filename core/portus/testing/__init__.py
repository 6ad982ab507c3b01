"""The test kit, shipped so that others can test their media: contracts and crashes."""
