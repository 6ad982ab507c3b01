cd /tmp/next; export PYTHONPATH=/tmp/next/core:/tmp/next; nice -n 19 /work/main/.venv/bin/python -m pytest -q -p no:cacheprovider "$@"
