"use strict";
// Puts the parts that changed into their places. Without it the page stands as it was loaded.
function listen() {
  const events = new EventSource("page/events");
  events.onmessage = (event) => {
    for (const [id, part] of Object.entries(JSON.parse(event.data))) {
      const place = document.getElementById(id);
      if (place) place.innerHTML = part;
    }
    document.body.dataset.link = "live";
    document.getElementById("seen").textContent = new Date().toLocaleTimeString();
  };
  events.onerror = () => {
    document.body.dataset.link = "lost";
    // The browser comes again by itself, but not after a refusal: a node that was starting, say.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}
listen();
