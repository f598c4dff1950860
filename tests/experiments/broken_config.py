# A configuration that is not Python, for test_cli.py; linters leave it out.
def get_config():
  return (
