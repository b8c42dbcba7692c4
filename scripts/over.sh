#!/usr/bin/env bash
# over.sh PYTHON FOLDER: makes a virtual environment that sees all packages of PYTHON's beneath its own.
set -euo pipefail
rm -rf "$2"
"$1" -m venv --without-pip "$2"
"$1" - "$2" << 'END'
import glob, site, sys
(place,) = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
with open(f"{place}/beneath.pth", "w") as file:
    file.writelines(f"import site; site.addsitedir({beneath!r})\n" for beneath in site.getsitepackages())
END
