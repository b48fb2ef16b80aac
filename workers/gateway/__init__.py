"""The HTTP gateway: OpenAI's API in front of the bus. It keeps no state, so that any number run side by side.

See docs/gateway.md.
"""
