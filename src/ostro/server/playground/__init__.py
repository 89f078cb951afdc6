"""The playground at `/` of `ostro serve --ui`: its files, serving them, and opening a browser. Knows no model and no
endpoint.

`static/` holds plain HTML, CSS and ES modules, served as they are. The page calls the API like any client.
"""
