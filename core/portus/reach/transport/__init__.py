"""Transport of messages and bytes between a trainer and a storage host: sockets, and verbs."""
