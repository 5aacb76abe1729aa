"""Settings of the documentation; see https://www.sphinx-doc.org/en/master/usage/configuration.html."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import bagua

project = "bagua"
author = "The bagua authors"
project_copyright = "2026, The bagua authors"
version = release = bagua.__version__

extensions = [
    "myst_parser",
    "facade_index",
    "mathml",
    "timelines",
    "topology_pictures",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# Docstrings are run by pytest, which also reaches private modules.
doctest_test_doctest_blocks = ""

html_theme = "furo"
html_title = "bagua"
html_static_path = ["static"]
html_css_files = ["cards.css", "formulas.css"]

# Docstrings of torch that our classes inherit are torch's to explain.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# `ReduceOp.SUM`, not what Python prints for it.
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
# Fields of dataclasses are documented where they are listed, once.
napoleon_use_ivar = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Prompts and outputs of an example are not part of what one wants to copy.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
