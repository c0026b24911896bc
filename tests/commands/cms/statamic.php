<?php
// The classes that the page of this CMS uses, and two saves: a new post, then the post at another place.
namespace Statamic\Events {
    class EntrySaving { public $authenticatedUser; public function __construct(public $entry) {} }
    class EntrySaved extends EntrySaving {}
    class EntryDeleted extends EntrySaving {}
}
namespace {
    function base_path($path = '') { return getcwd() . ($path ? "/$path" : ''); }
    class User { function name() { return 'Ada Author'; } function email() { return 'ada@example.org'; } }
    class Entry {
        public $path = 'content/collections/blog/hello.md';
        function id() { return 7; }
        function path() { return base_path($this->path); }
        function collectionHandle() { return 'blog'; }
        function slug() { return basename($this->path, '.md'); }
        function get($key) { return 'Hello'; }
    }
    require 'page.php';
    $listener = new App\Listeners\EnqueueEntry();
    $entry = new Entry();
    $listener->handleSaving(new Statamic\Events\EntrySaving($entry));
    if ($argv[1] === 'move') {
        rename($entry->path, $entry->path = 'content/collections/blog/bye.md');
    }
    $saved = new Statamic\Events\EntrySaved($entry);
    $saved->authenticatedUser = new User();
    $listener->handleSaved($saved);
}
