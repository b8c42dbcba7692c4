"""What a model may write to make a browser or a terminal do something: 100 scripts and 20 escapes."""

from __future__ import annotations

DOES = ("window.hit=1", "alert(1)", "fetch('http://127.0.0.1:9/x')", "document.title='hit'", "parent.hit=1")
WAYS = (
    "<script>{}</script>",
    "</script><script>{}</script>",
    "<img src=x onerror={}>",
    '"><img src=x onerror="{}">',
    "'><svg onload={}>",
    "<svg><script>{}</script></svg>",
    "<iframe srcdoc='<script>{}</script>'></iframe>",
    '<iframe src="javascript:{}"></iframe>',
    '<a href="javascript:{}">x</a>',
    "<body onload={}>",
    "<details open ontoggle={}>",
    "<input autofocus onfocus={}>",
    "<video><source onerror={}></video>",
    "<math><mtext><script>{}</script></mtext></math>",
    "<style>@import 'http://127.0.0.1:9/{}';</style>",
    '<link rel=stylesheet href="data:text/css,{}">',
    '<object data="javascript:{}"></object>',
    "</textarea></title><script>{}</script>",
    "<template><script>{}</script></template><!--><script>{}</script>-->",
    "${{{}}}{{{{{}}}}}<%={}%>",
)
XSS = [way.replace("{}", does) for way in WAYS for does in DOES]
ESCAPES = [
    f"\x1b{end}before\x07after" for end in ("[2J", "]0;title", "[31m", "[1A", "P1$r", "c", "[?25l", "]8;;http://x")
]
ESCAPES += [f"a{sign}b" for sign in "\x00\x08\x0b\x0c\x0d\x7f\x9b\u202e\u2066\u200b\ufeff\u2028"]
