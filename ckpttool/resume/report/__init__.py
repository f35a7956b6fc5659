"""A verdict for people and programs: terminal, HTML, JUnit, Prometheus."""
