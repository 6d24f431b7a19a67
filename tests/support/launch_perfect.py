"""`python -m launch` with the fake draft that knows every answer in the place of the draft worker."""

import sys

import launch.specs
from launch.__main__ import main

launch.specs.PACKAGES["draft"] = "tests.support.perfect_draft"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
