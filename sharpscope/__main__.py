"""`python -m sharpscope` is the `sharpscope` command."""

from sharpscope.cli import main

if __name__ == "__main__":
    main()
