"""`python -m lockstep` is the `lockstep` command."""

from lockstep.cli.entry import main

if __name__ == "__main__":
    main()
