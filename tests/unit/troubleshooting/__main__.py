"""Write docs/troubleshooting.md: `python -m tests.unit.troubleshooting`."""

from tests.unit.troubleshooting.page import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
