"""`python -m node` is `node-daemon`."""

from node.cli import main

if __name__ == "__main__":
    main()
