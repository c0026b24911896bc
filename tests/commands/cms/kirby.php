<?php
// The classes that the page of this CMS uses, and two saves: a new post, then the post at another place.
namespace Kirby\Cms {
    class Field { function __construct(public $text) {} function value() { return $this->text; } }
    class File {}
    class Page {
        function __construct(public $id) {}
        function id() { return $this->id; }
        function root() { return getcwd() . "/content/$this->id"; }
        function title() { return new Field('Hello'); }
    }
    class User {
        function nameOrEmail() { return new Field('Ada Author'); }
        function email() { return 'ada@example.org'; }
    }
    class Event {
        function __construct(public $action, public $arguments) {}
        function action() { return $this->action; }
        function arguments() { return $this->arguments; }
    }
    class App {
        static $hooks;
        static function plugin($name, $parts) { self::$hooks = $parts['hooks']; }
        static function instance() { return new self(); }
        function root($name) { return getcwd() . "/$name"; }
        function user() { return new User(); }
    }
}
namespace {
    use Kirby\Cms\{App, Event, Page};
    require 'page.php';
    $hook = App::$hooks['page.*:after'];
    $old = new Page('1_hello');
    if ($argv[1] === 'save') {
        $hook(new Event('create', ['page' => $old]));
        $hook(new Event('render', ['contentType' => 'html', 'page' => $old]));
    } else {
        rename('content/1_hello', 'content/1_bye');
        $hook(new Event('changeSlug', ['newPage' => new Page('1_bye'), 'oldPage' => $old]));
    }
}
