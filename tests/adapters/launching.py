"""How tests start a script on two processes."""

from typing import Final

TWO: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Where they meet is a port that the system chooses: two tests run at once."""
