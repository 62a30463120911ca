"""Writes timelines (rows of `terapipe.schedule.trace`) as a web page, a picture, or a Perfetto trace."""

from terapipe.viz.html import render_html, write_html
from terapipe.viz.perfetto import render_perfetto, write_perfetto
from terapipe.viz.png import write_comparison_png, write_png

__all__ = ["render_html", "render_perfetto", "write_comparison_png", "write_html", "write_perfetto", "write_png"]
