"""Texts to go on from: agents that repeat what they have read, and prose that repeats nothing."""

_CODE = '''
def load_settings(path, timeout=30):
    """Read the settings of a service from a file."""
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    settings.setdefault("timeout", timeout)
    settings.setdefault("retries", 3)
    settings.setdefault("endpoint", "https://localhost:8443")
    return settings


def connect(settings):
    """Open a connection with the settings that were loaded."""
    client = Client(settings["endpoint"], timeout=settings["timeout"])
    for attempt in range(settings["retries"]):
        try:
            client.open()
            return client
        except ConnectionError as error:
            log.warning("attempt %d failed: %s", attempt, error)
    raise RuntimeError("no connection")
'''

_RECORDS = "\n".join(
    f'    {{"id": {1000 + i}, "name": "sensor-{i:02d}", "status": "ok", "reading": {20 + i % 7}.{i % 10}, '
    f'"unit": "celsius", "room": "hall-{i % 3}"}},'
    for i in range(12)
)

_LOG = "\n".join(
    f"2026-03-{1 + i:02d} 08:00:00 INFO scheduler started job backup-{i:02d} on node-{i % 4} with priority normal"
    for i in range(14)
)

_EDIT = "The whole file after renaming `timeout` to `limit`:"

REPETITIVE = {
    "code_edit": f"The file before the edit:\n```python{_CODE}```\n{_EDIT}\n```python",
    "tool_result": f'Tool result:\n{{"records": [\n{_RECORDS}\n]}}\n\nThe same result once more:\n{{"records": [\n',
    "log": f"The log:\n{_LOG}\n\nThe log again, unchanged:\n2026-03-01 08:00:00 INFO",
}

PROSE = {
    "story": "It was late in autumn when the old lighthouse keeper decided to write down what he had seen. That year,",
    "essay": "Few inventions changed daily life as quietly as the bicycle did. In the cities of those years,",
    "letter": "Dear Anna, I am sorry that my answer comes so late. Since we met in the mountains, much has happened:",
}
